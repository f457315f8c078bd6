"""Whole steps of a runner with sampling, one at a time and with look-ahead: how long the device is idle in between.

A step's period is compared with the profiler's time of its kernels and copies.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.models.gpu.decoder import GpuDecoderModel
from kernels.runner import PendingStep
from kernels.runtime.gpu.step_inputs import StepInputs
from kernels.runtime.model_runner import ModelRunner, PoolShape
from kernels.sampling.gpu.sampler import GpuSampler
from scheduler.plan import PENDING_TOKEN, SamplingParams, ScheduledRow, StepPlan

NUM_WARMUPS = 3


@dataclass(frozen=True, slots=True)
class StepPeriods:
    """Periods of decoding steps."""

    num_rows: int
    num_tokens: int
    """tokens of context"""
    period_s: float
    """from one step's begin to the next one's, each waiting for the one before"""
    lookahead_period_s: float
    """with one more step in flight"""
    device_s: float | None
    """kernels and copies of one step; None without a device"""
    idle_share: float | None
    """share of period_s in which the device is idle"""
    lookahead_idle_share: float | None
    speedup: float
    """period_s over lookahead_period_s"""


def measure_steps(
    model: GpuDecoderModel, inputs: StepInputs, num_rows: int, context_len: int, num_steps: int
) -> StepPeriods:
    """`inputs` is what the model was made with; its pool needs room for the rows at that context."""
    runner = _runner(model, inputs, num_rows, context_len)
    decode = _Decode(runner, num_rows, context_len, num_steps)
    decode.run(num_in_flight=1)  # compiles and captures
    period_s, lookahead_s = decode.run(num_in_flight=1), decode.run(num_in_flight=2)
    device_s = None
    if inputs.device.type == "cuda":
        device_s = _device_s(lambda: decode.run(num_in_flight=2)) / (num_steps + NUM_WARMUPS)
    return StepPeriods(
        num_rows,
        context_len,
        period_s,
        lookahead_s,
        device_s,
        None if device_s is None else 1 - device_s / period_s,
        None if device_s is None else 1 - device_s / lookahead_s,
        period_s / lookahead_s,
    )


def _runner(model: GpuDecoderModel, inputs: StepInputs, num_rows: int, context_len: int) -> ModelRunner:
    pool = model.kv_pool
    return ModelRunner(
        model,
        PoolShape(pool.num_blocks, pool.block_size, context_len),
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows,
        make_sampler=lambda: GpuSampler(model.config.vocab_size, inputs),
    )


class _Decode:
    """Rows that decode up to a context length; what their K/V holds does not matter."""

    def __init__(self, runner: ModelRunner, num_rows: int, context_len: int, num_steps: int) -> None:
        self._runner = runner
        self._num_steps = num_steps
        self._first = max(context_len - num_steps - NUM_WARMUPS, 1)
        width = -(-context_len // runner.block_size)
        self._tables = [tuple(range(row * width, (row + 1) * width)) for row in range(num_rows)]
        self._sampling = [SamplingParams(seed=row, temperature=0.7, top_p=0.9) for row in range(num_rows)]

    def run(self, num_in_flight: int) -> float:
        """Seconds per step with at most `num_in_flight` steps in flight."""
        self._runner.step(StepPlan(0, (), released_slots=tuple(range(len(self._tables)))))
        in_flight: deque[PendingStep] = deque()
        started_s = 0.0
        tokens: Sequence[int | None] = [1] * len(self._tables)
        for step_idx in range(self._num_steps + NUM_WARMUPS):
            if step_idx == NUM_WARMUPS:
                started_s = time.perf_counter()
            in_flight.append(self._runner.begin(StepPlan(step_idx, tuple(self._rows(step_idx, tokens)))))
            if len(in_flight) == num_in_flight:
                tokens = [row.token_id for row in in_flight.popleft().wait().rows]
            if num_in_flight > 1:
                tokens = [PENDING_TOKEN] * len(self._tables)
        while in_flight:
            in_flight.popleft().wait()
        return (time.perf_counter() - started_s) / self._num_steps

    def _rows(self, step_idx: int, tokens: Sequence[int | None]) -> Iterator[ScheduledRow]:
        for slot, token_id in enumerate(tokens):
            assert token_id is not None, "random weights gave a row without a token"
            yield ScheduledRow(
                request_id=f"r{slot}",
                slot=slot,
                token_ids=(token_id,),
                num_computed_tokens=self._first + step_idx,
                block_table=self._tables[slot],
                sampling=self._sampling[slot],
                num_generated_tokens=step_idx,
            )


def _device_s(run: Callable[[], object]) -> float:
    """Seconds of device time of all kernels and copies in `run`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in profile.key_averages())) / 1e6
