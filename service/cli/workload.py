"""Workloads of the benches: read from a file or made by shape, with prompts cut from real documents.

A shape is a number of prompt tokens, of output tokens and of requests that all arrive at time 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from service.errors import SettingsError
from service.text import Tokenizer

MAX_REQUESTS = 10_000
MAX_FILE_BYTES = 16 << 20
MAX_SHAPES = 16
MAX_TOKENS = 1 << 20
"""Limit of one prompt or output."""
MAX_PROMPT_TOKENS = 1 << 22
"""Limit of a shape's prompts together: about 150 MB of numbers."""
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
    """Read a workload file and cut its prompts. Raises SettingsError naming what is wrong with the file."""
    return cut_prompts(_read(path)[:limit], path.resolve().parent, tokenizer)


def cut_prompts(
    lengths: Sequence[tuple[int, int]], folder: Path, tokenizer: Tokenizer
) -> list[WorkloadRequest]:
    """Make one request for each (prompt tokens, output tokens) from the documents that belong to `folder`.

    Raises SettingsError when there are no documents.
    """
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
    """Yield the documents' tokens in order, again and again, so that no two prompts begin alike."""
    files = _documents(folder)
    while True:
        for file in files:
            yield from tokenizer.encode_prompt(file.read_text("utf-8"))


def _documents(folder: Path) -> Sequence[Path]:
    for candidate in (folder / DOCUMENTS_BESIDE, SAMPLES):
        files = sorted([*candidate.glob("*.txt"), *candidate.glob("*.md")])
        if files:
            return files
    raise SettingsError(f"no documents to cut prompts from: neither {DOCUMENTS_BESIDE}/*.txt next to the workload "
                        f"nor {SAMPLES}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    prompt_tokens: int
    output_tokens: int
    num_requests: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.prompt_tokens, self.output_tokens, self.num_requests


TYPICAL = (
    Shape("long-prompts", 1_024, 16, 16),
    Shape("long-answers", 16, 256, 32),
    Shape("lone-stream", 64, 256, 1),
    Shape("short-jobs", 64, 16, 256),
)
"""The extremes of a service's load: computing prompts, computing answers, one request's latency, many short jobs."""


def parse_shapes(text: str) -> list[Shape]:
    """Parse `1024:16:16,short-jobs`, or `typical` for all of TYPICAL. Raises SettingsError naming what is wrong."""
    parts = [part.strip() for part in text.split(",")]
    shapes = [shape for part in parts for shape in (TYPICAL if part == "typical" else (_parse(part),))]
    if len(shapes) > MAX_SHAPES:
        raise SettingsError(f"--shape names {len(shapes)} shapes; the limit is {MAX_SHAPES}")
    names = [shape.name for shape in shapes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"--shape names {twice!r} twice")
    return shapes


def _parse(text: str) -> Shape:
    for shape in TYPICAL:
        if text == shape.name:
            return shape
    fields = text.split(":")
    if len(fields) != 3 or not all(field.isascii() and field.isdecimal() for field in fields):
        known = ", ".join(shape.name for shape in TYPICAL)
        raise SettingsError(
            f"--shape: {text!r} is neither PROMPT_TOKENS:OUTPUT_TOKENS:REQUESTS, such as 1024:16:16, "
            f"nor one of {known}, typical"
        )
    for field, what, most in zip(
        fields,
        ("prompt tokens", "output tokens", "requests"),
        (MAX_TOKENS, MAX_TOKENS, MAX_REQUESTS),
        strict=True,
    ):
        if len(field) > 9 or not 1 <= int(field) <= most:
            raise SettingsError(f"--shape {text}: {what} must be 1 to {most}; it is {field}")
    prompt_tokens, output_tokens, num_requests = map(int, fields)
    if prompt_tokens * num_requests > MAX_PROMPT_TOKENS:
        raise SettingsError(
            f"--shape {text}: {prompt_tokens * num_requests} prompt tokens in all; the limit is {MAX_PROMPT_TOKENS}"
        )
    return Shape(text, prompt_tokens, output_tokens, num_requests)


def shape_requests(shape: Shape, limit: int | None, tokenizer: Tokenizer) -> Sequence[WorkloadRequest]:
    """Cut a shape's prompts from the shipped sample texts; no two begin alike until those are used up."""
    lengths = [(shape.prompt_tokens, shape.output_tokens)] * shape.num_requests
    return cut_prompts(lengths[:limit], SAMPLES, tokenizer)
