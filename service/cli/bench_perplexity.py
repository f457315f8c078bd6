"""`tailrace bench perplexity`: measures what quantization or a data type costs in accuracy, on given documents.

Documents are cut into windows of fixed length that do not overlap. Each token of a window but the first is predicted
from those before it in the same window (every token, where the tokenizer opens a text with one of its own);
perplexity is exp of the mean negative log-probability.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from kernels.errors import OptionsError
from kernels.runner import Dtype, Quantization
from service.cli.console import log_warnings, note, print_json, print_table
from service.cli.summarize import local_tokenizer
from service.engine.build import load
from service.errors import SettingsError
from service.pipelines.documents import find_documents, read_document
from service.settings import Settings, changed, load_settings
from service.text import Tokenizer

Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True, slots=True)
class Windows:
    """The tokens to score, the same for every run."""

    windows: list[list[int]]
    num_given: int
    """How many tokens at the start of each window are not predicted."""
    num_documents: int

    @property
    def sizes(self) -> list[int]:
        return [len(window) - self.num_given for window in self.windows]

    @property
    def num_tokens(self) -> int:
        return sum(self.sizes)


def perplexity(
    paths: list[Path],
    *,
    quantizations: str | None,
    dtypes: str | None,
    window: int,
    max_tokens: int,
    as_json: bool,
) -> None:
    """Print each run's perplexity. Raises SettingsError and JobError."""
    settings = load_settings()
    if settings.engine != "model":
        raise SettingsError(f"bench perplexity needs a model; TAILRACE_ENGINE is {settings.engine}")
    chosen_dtypes = _choices("--dtype", dtypes or settings.dtype, get_args(Dtype))
    chosen_quantizations = _choices(
        "--quantization", quantizations or settings.quantization, get_args(Quantization)
    )
    log_warnings()
    windows = read_windows(find_documents(paths, None), local_tokenizer(settings), window, max_tokens)
    scores: dict[str, list[float]] = {}
    for dtype in chosen_dtypes:
        for quantization in chosen_quantizations:
            name, losses = _run(settings, dtype, quantization, windows)
            if name in scores:
                raise SettingsError(
                    f"--dtype: {dtype!r} is {name} here, which another one of the list is too"
                )
            scores[name] = losses
    report = {
        "model": settings.model,
        "documents": windows.num_documents,
        "windows": len(windows.windows),
        "window_tokens": window,
        "tokens": windows.num_tokens,
        "runs": compare(scores, windows.sizes),
    }
    _show(report, as_json=as_json)


def _choices(option: str, text: str, known: Sequence[str]) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    for value in values:
        if value not in known:
            raise SettingsError(f"{option}: {value!r} is not one of {', '.join(known)}")
    if len(set(values)) < len(values):
        raise SettingsError(f"{option}: {text!r} names one twice")
    return values


def read_windows(
    documents: Sequence[Path], tokenizer: Tokenizer, window_tokens: int, max_tokens: int
) -> Windows:
    """Cut the documents into windows, in order, until `max_tokens` are to be predicted.

    Raises SettingsError when there is nothing to predict, JobError for a document that cannot be read.
    """
    opening = tokenizer.encode_prompt("")
    windows: list[list[int]] = []
    missing, num_documents = max_tokens, 0
    num_given = max(1, len(opening))
    for document in documents:
        if missing <= 0:
            break
        num_documents += 1
        for window in _cut(tokenizer.encode_prompt(read_document(document)), opening, window_tokens):
            window = window[: num_given + missing]
            if missing > 0 and len(window) > num_given:
                windows.append(window)
                missing -= len(window) - num_given
    if not windows:
        raise SettingsError("the documents hold no token to predict")
    return Windows(windows, num_given, num_documents)


def _cut(token_ids: list[int], opening: list[int], window_tokens: int) -> Iterator[list[int]]:
    """Yield windows that each begin with the tokens that open a text."""
    body = token_ids[len(opening) :]
    step = max(1, window_tokens - len(opening))
    for first in range(0, len(body), step):
        yield [*opening, *body[first : first + step]]


def _run(settings: Settings, dtype: str, quantization: str, windows: Windows) -> tuple[str, list[float]]:
    """Score one configuration: (a name from what was loaded, each window's loss)."""
    from kernels.runtime.model_runner import ModelRunner  # takes seconds
    from kernels.tools.perplexity import score_windows

    runner = load(changed(settings, dtype=dtype, quantization=quantization))
    assert isinstance(runner, ModelRunner), "the settings name a model"
    name = f"{str(runner.dtype).removeprefix('torch.')}, {quantization}"
    note(f"{name} …")
    try:
        return name, list(score_windows(runner, windows.windows, num_given=windows.num_given))
    except OptionsError as error:
        raise SettingsError(f"{error}: lower --window or raise TAILRACE_KV_CACHE_BYTES") from None


def compare(scores: dict[str, list[float]], sizes: Sequence[int]) -> dict[str, dict[str, float | None]]:
    """Return each run's perplexity and its ratio to the first run's, with the ratio's standard error over windows."""
    baseline = next(iter(scores.values()))
    num_tokens = sum(sizes)
    runs: dict[str, dict[str, float | None]] = {}
    for name, losses in scores.items():
        differences = [loss - first for loss, first in zip(losses, baseline, strict=True)]
        mean = sum(differences) / num_tokens
        # Tokens of a window are not independent of each other; windows nearly are.
        spread = sum(
            (difference - mean * size) ** 2 for difference, size in zip(differences, sizes, strict=True)
        )
        num_windows = len(sizes)
        error = math.sqrt(spread * num_windows / (num_windows - 1)) / num_tokens if num_windows > 1 else None
        ratio = math.exp(mean)
        runs[name] = {
            "perplexity": round(math.exp(sum(losses) / num_tokens), 4),
            "ratio": round(ratio, 5),
            "ratio_stderr": None if error is None else round(ratio * error, 5),
        }
    return runs


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    rows = []
    for name, run in report["runs"].items():
        error = "–" if run["ratio_stderr"] is None else f"± {run['ratio_stderr']:.4f}"
        rows.append((name, f"{run['perplexity']:.3f}", f"{run['ratio']:.4f}", error))
    title = (
        f"{report['model']}: {report['tokens']} tokens of {report['documents']} documents, "
        f"windows of {report['window_tokens']}"
    )
    print_table(("run", "perplexity", "of the first", "std. error"), rows, title=title, right=True)
