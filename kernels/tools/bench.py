"""How fast a model's steps are, alone: no Kafka, no Redis, no scheduler. Plain values for `tailrace bench`."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.errors import OptionsError
from kernels.runner import Runner
from scheduler.plan import SamplingParams, ScheduledRow, StepPlan

_GREEDY = SamplingParams(seed=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Steps in which each of `batch` requests gets one more token, sampling included."""

    batch: int
    context_tokens: int
    best_step_ms: float
    median_step_ms: float
    output_tokens_per_s: float
    """From the median step time."""


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """Prompts computed without cached K/V, chunk by chunk."""

    num_prompts: int
    prompt_tokens: int
    """Tokens of each prompt."""
    chunk_tokens: int
    best_s: float
    median_s: float
    """Time for all prompts."""
    median_step_ms: float
    """The mean over a run's chunks, for the median run."""
    prompt_tokens_per_s: float
    """From the median step time."""


def bench_decode(
    runner: Runner, batches: Sequence[int] = (1, 8, 32, 64), *, context_tokens: int = 150, repeats: int = 20
) -> list[DecodeFigures]:
    """Time steps at a context of `context_tokens`, K/V freshly computed. The largest batch must fit pool and runner.

    Raises OptionsError when it does not fit the pool.
    """
    prompts = _Prompts(runner, max(batches), context_tokens)
    prompts.compute(chunk_tokens=min(64, context_tokens))
    return [_decode_figures(prompts, batch, context_tokens, repeats) for batch in batches]


def bench_prefill(
    runner: Runner,
    *,
    num_prompts: int = 4,
    prompt_tokens: int = 1024,
    chunk_tokens: int,
    repeats: int = 3,
) -> PrefillFigures:
    """Time whole prompts, one after the other, `chunk_tokens` per step."""
    prompts = _Prompts(runner, num_prompts, prompt_tokens)
    prompts.compute(chunk_tokens)
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        prompts.compute(chunk_tokens)
        times.append(time.perf_counter() - started_s)
    median_s = statistics.median(times)
    num_steps = num_prompts * -(-prompt_tokens // chunk_tokens)
    return PrefillFigures(
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        chunk_tokens=chunk_tokens,
        best_s=min(times),
        median_s=median_s,
        median_step_ms=median_s / num_steps * 1e3,
        prompt_tokens_per_s=num_prompts * prompt_tokens / median_s,
    )


def _decode_figures(prompts: "_Prompts", batch: int, context_tokens: int, repeats: int) -> DecodeFigures:
    times = []
    for _ in range(repeats + 1):
        started_s = time.perf_counter()
        prompts.decode(batch)
        times.append((time.perf_counter() - started_s) * 1e3)
    median_ms = statistics.median(times[1:])
    return DecodeFigures(batch, context_tokens, min(times[1:]), median_ms, batch / median_ms * 1e3)


class _Prompts:
    """Requests of equal length, each in its own blocks. Raises OptionsError when the runner has no room for them."""

    def __init__(self, runner: Runner, num_prompts: int, num_tokens: int) -> None:
        blocks = -(-num_tokens // runner.block_size)
        if num_prompts * blocks > runner.num_blocks or num_tokens > runner.max_model_len:
            raise OptionsError(
                f"{num_prompts} × {num_tokens} tokens need {num_prompts * blocks} blocks and a model length of "
                f"{num_tokens}; there are {runner.num_blocks} blocks and {runner.max_model_len} tokens"
            )
        self._runner = runner
        self._num_tokens = num_tokens
        self._tables = [tuple(range(row * blocks, (row + 1) * blocks)) for row in range(num_prompts)]
        self._step_id = 0

    def compute(self, chunk_tokens: int) -> None:
        for row in range(len(self._tables)):
            for first in range(0, self._num_tokens, chunk_tokens):
                self._step([self._row(row, first, min(chunk_tokens, self._num_tokens - first))])

    def decode(self, batch: int) -> None:
        """Compute the last token of each again: the same work and K/V, so steps can be repeated."""
        self._step([self._row(row, self._num_tokens - 1, 1) for row in range(batch)])

    def _row(self, row: int, first: int, count: int) -> ScheduledRow:
        ids = tuple(
            (row * 7919 + position * 31) % self._runner.vocab_size for position in range(first, first + count)
        )
        ends = first + count == self._num_tokens
        table = self._tables[row][: -(-(first + count) // self._runner.block_size)]
        return ScheduledRow(f"bench-{row}", row, ids, first, table, _GREEDY if ends else None, 0)

    def _step(self, rows: list[ScheduledRow]) -> None:
        self._step_id += 1
        result = self._runner.step(StepPlan(self._step_id, tuple(rows)))
        for row in result.rows:
            if row.error is not None:
                raise RuntimeError(f"{row.request_id}: {row.error}")
