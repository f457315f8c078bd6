"""`bench perplexity`: which tokens are scored, what the ratio means, and the command from end to end."""

import json
import math
from pathlib import Path

import pytest

from service.cli.bench_perplexity import compare, read_windows
from service.errors import JobError, SettingsError
from service.text import load_tokenizer
from tests.service.cli.bench_support import run_bench, save_tiny_model
from tests.service.cli.conftest import Tailrace


class OpeningTokenizer:
    """Bytes, after a token that opens every text."""

    def __init__(self) -> None:
        self._bytes = load_tokenizer(None)

    def __getattr__(self, name: str) -> object:
        return getattr(self._bytes, name)

    def encode_prompt(self, text: str) -> list[int]:
        return [256, *text.encode()]


@pytest.fixture
def documents(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for path, text in zip(paths, ("abcdefghij", "k", "lmnop"), strict=True):
        path.write_text(text)
    return paths


def test_windows_do_not_overlap_and_stay_within_documents(documents: list[Path]) -> None:
    windows = read_windows(documents, load_tokenizer(None), 4, 100)

    assert [bytes(window) for window in windows.windows] == [b"abcd", b"efgh", b"ij", b"lmno"]
    assert (windows.num_given, windows.num_tokens, windows.num_documents) == (1, 3 + 3 + 1 + 3, 3)


def test_every_window_opens_as_the_tokenizer_opens_a_text(documents: list[Path]) -> None:
    windows = read_windows(documents, OpeningTokenizer(), 5, 100)  # type: ignore[arg-type]

    assert all(window[0] == 256 for window in windows.windows)
    assert [bytes(window[1:]) for window in windows.windows] == [b"abcd", b"efgh", b"ij", b"k", b"lmno", b"p"]
    assert windows.num_tokens == 10 + 1 + 5


@pytest.mark.parametrize(
    ("max_tokens", "last"), [(1, b"ab"), (3, b"abcd"), (4, b"ef"), (7, b"ij"), (8, b"lm")]
)
def test_exactly_so_many_tokens_are_predicted(documents: list[Path], max_tokens: int, last: bytes) -> None:
    windows = read_windows(documents, load_tokenizer(None), 4, max_tokens)

    assert windows.num_tokens == max_tokens
    assert bytes(windows.windows[-1]) == last


def test_documents_without_a_token_to_predict_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("k")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="no token to predict"):
        read_windows([tmp_path / "a.txt"], load_tokenizer(None), 4, 9)
    with pytest.raises(JobError, match=r"b\.txt is not UTF-8"):
        read_windows([tmp_path / "b.txt"], load_tokenizer(None), 4, 9)


def test_ratio_is_of_perplexities_and_its_error_is_that_of_paired_windows() -> None:
    sizes = [10, 10, 20]
    runs = compare(
        {"one": [20.0, 30.0, 50.0], "other": [20.1, 30.1, 50.2], "third": [20.4, 29.6, 50.2]}, sizes
    )

    assert runs["one"] == {"perplexity": round(math.exp(2.5), 4), "ratio": 1.0, "ratio_stderr": 0.0}
    assert runs["other"]["ratio"] == pytest.approx(math.exp(0.01), abs=1e-5)
    assert runs["other"]["ratio_stderr"] == 0.0, "every token is worse by the same"
    third = runs["third"]["ratio_stderr"]
    mean = 0.2 / 40
    spread = (0.4 - 10 * mean) ** 2 + (-0.4 - 10 * mean) ** 2 + (0.2 - 20 * mean) ** 2
    assert third == pytest.approx(math.exp(mean) * math.sqrt(spread * 3 / 2) / 40, abs=1e-5)


def test_one_window_has_no_error_to_tell() -> None:
    assert compare({"one": [20.0], "other": [20.1]}, [10])["other"]["ratio_stderr"] is None


def test_command_runs_each_choice_on_the_same_tokens(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("The quick brown fox. " * 12)
    ended = run_bench(
        "perplexity", str(tmp_path / "texts"), "--quantization", "none,int8", "--dtype", "float32,bfloat16",
        "--window", "50", "--max-tokens", "200", "--json",
        TAILRACE_MODEL=str(model), TAILRACE_DEVICE="cpu", TAILRACE_KV_CACHE_BYTES="1048576",
    )  # fmt: skip
    report = json.loads(ended.stdout)
    names = ["float32, none", "float32, int8", "bfloat16, none", "bfloat16, int8"]
    assert list(report["runs"]) == names
    assert ended.stderr.splitlines() == [f"{name} …" for name in names]
    assert (report["tokens"], report["documents"], report["windows"]) == (200, 1, 5)
    assert report["runs"]["float32, none"]["ratio"] == 1.0
    for name in names[1:]:
        assert report["runs"][name]["ratio"] == pytest.approx(1.0, abs=0.2)
        assert report["runs"][name]["ratio"] != 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--quantization", "int3"), "--quantization: 'int3' is not one of none, int8"),
        (("--quantization", "int8,int8"), "--quantization: 'int8,int8' names one twice"),
        (("--dtype", "float8"), "--dtype: 'float8' is not one of auto, float32, bfloat16, float16"),
    ],
)
def test_unknown_choices_are_refused(
    arguments: tuple[str, ...], message: str, documents: list[Path], in_process: Tailrace
) -> None:
    ended = in_process("bench", "perplexity", str(documents[0]), *arguments)
    assert (ended.returncode, ended.stderr) == (2, f"tailrace: {message}\n")


def test_deterministic_engine_has_no_perplexity(documents: list[Path], in_process: Tailrace) -> None:
    ended = in_process("bench", "perplexity", str(documents[0]), TAILRACE_ENGINE="deterministic")
    assert ended.returncode == 2
    assert ended.stderr == "tailrace: bench perplexity needs a model; TAILRACE_ENGINE is deterministic\n"
