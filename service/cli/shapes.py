"""Synthetic workloads by shape: prompt tokens, output tokens and how many requests, all present at time 0."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.cli.workload import MAX_REQUESTS, SAMPLES, WorkloadRequest, cut_prompts
from service.errors import SettingsError
from service.text import Tokenizer

MAX_SHAPES = 16
MAX_TOKENS = 1 << 20
"""Of one prompt or output."""
MAX_PROMPT_TOKENS = 1 << 22
"""Of a shape's prompts together: about 150 MB of numbers."""


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
"""The ends of what a service meets: computing prompts, computing answers, latency of one, churn of many."""


def parse_shapes(text: str) -> list[Shape]:
    """From `1024:16:16,short-jobs`, or `typical` for all of TYPICAL. Raises SettingsError naming what is wrong."""
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
    """Prompts are cut from the shipped sample texts; no two begin alike until those are used up."""
    lengths = [(shape.prompt_tokens, shape.output_tokens)] * shape.num_requests
    return cut_prompts(lengths[:limit], SAMPLES, tokenizer)
