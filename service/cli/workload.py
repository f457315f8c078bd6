"""Workload files of the benches, and prompts of exactly the lengths they ask for, cut from real documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from service.errors import SettingsError
from service.text import Tokenizer

MAX_REQUESTS = 10_000
MAX_FILE_BYTES = 16 << 20
DOCUMENTS_BESIDE = "../peps"
"""Relative to the workload's folder; the shipped samples stand in where there are none."""
_PACKAGED_SAMPLES = Path(__file__).resolve().parents[1] / "samples"
SAMPLES = (
    _PACKAGED_SAMPLES if _PACKAGED_SAMPLES.is_dir() else _PACKAGED_SAMPLES.parents[1] / "ops" / "samples"
)
"""A wheel carries the texts inside the package; a checkout keeps them in `ops/`."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


def load_workload(path: Path, limit: int | None, tokenizer: Tokenizer) -> list[WorkloadRequest]:
    """Raises SettingsError naming what is wrong with the file."""
    return cut_prompts(_read(path)[:limit], path.resolve().parent, tokenizer)


def cut_prompts(
    lengths: Sequence[tuple[int, int]], folder: Path, tokenizer: Tokenizer
) -> list[WorkloadRequest]:
    """Requests of (prompt tokens, output tokens), in this order, from the documents that belong to `folder`."""
    tokens = _token_source(folder, tokenizer)
    return [
        WorkloadRequest(tuple(next(tokens) for _ in range(num_prompt_tokens)), max_tokens)
        for num_prompt_tokens, max_tokens in lengths
    ]


def _read(path: Path) -> list[tuple[int, int]]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{path} has {path.stat().st_size} bytes; the limit is {MAX_FILE_BYTES}")
        entries = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise SettingsError(f"workload {path} cannot be read: {error}") from error
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_REQUESTS:
        raise SettingsError(f"workload {path} must be a JSON list of 1 to {MAX_REQUESTS} requests")
    return [_lengths(path, number, entry) for number, entry in enumerate(entries)]


def _lengths(path: Path, number: int, entry: object) -> tuple[int, int]:
    values = [
        entry.get(name) if isinstance(entry, dict) else None for name in ("prompt_tokens", "max_tokens")
    ]
    prompt_tokens, max_tokens = values
    if type(prompt_tokens) is int and type(max_tokens) is int and prompt_tokens > 0 and max_tokens > 0:
        return prompt_tokens, max_tokens
    raise SettingsError(
        f"workload {path}, request {number}: prompt_tokens and max_tokens must be numbers above 0"
    )


def _token_source(folder: Path, tokenizer: Tokenizer) -> Iterator[int]:
    """Tokens of the documents, one after the other, again and again: no two prompts begin alike."""
    files = _documents(folder)
    while True:
        for file in files:
            yield from tokenizer.encode_prompt(file.read_text("utf-8"))


def _documents(folder: Path) -> Sequence[Path]:
    for candidate in (folder / DOCUMENTS_BESIDE, SAMPLES):
        files = sorted([*candidate.glob("*.txt"), *candidate.glob("*.md")])
        if files:
            return files
    raise SettingsError(f"no documents to cut prompts from: neither {DOCUMENTS_BESIDE}/*.txt beside the workload "
                        f"nor {SAMPLES}")  # fmt: skip
