"""Serves requests through the real Scheduler and Runner under given circumstances, and keeps every row of logits."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.loading import load_runner
from kernels.runtime.kv_pool import bytes_per_block
from kernels.runtime.model_runner import ModelRunner
from kernels.sampling.cpu.sampler import Sampler
from kernels.weights.checkpoint import open_checkpoint
from kernels.weights.source import resolve_model
from scheduler.plan import RowResult, SamplingParams, ScheduledRow, StepPlan
from scheduler.scheduler import Scheduler
from scheduler.spec import RequestSpec
from scheduler.stats import SchedulerStats
from tests.support.configs import runner_options, scheduler_config

Logits = Mapping[tuple[int, int], bytes]
"""Keyed by request and position of the token chosen from them."""


class RecordingSampler(Sampler):
    """The product's sampler; keeps the rows of logits that it gets."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.logits: dict[tuple[int, int], bytes] = {}

    def sample(self, logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> list[RowResult]:
        for row, line in zip(rows, logits, strict=True):
            self.logits[int(row.request_id), row.sample_position] = line.numpy().tobytes()
        return super().sample(logits, rows)


@dataclass(frozen=True)
class Load:
    """Requests that are submitted at once."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int

    def sampling(self, number: int) -> SamplingParams:
        """Greedy and random, with and without penalties; depends only on the request, not on others in the batch."""
        return SamplingParams(
            seed=1000 + number,
            temperature=0.8 * (number % 2),
            top_p=1.0 if number % 3 else 0.9,
            frequency_penalty=0.3 * (number % 4 == 3),
        )


@dataclass(frozen=True)
class Circumstances:
    """All that a request's tokens must not depend on."""

    chunk_tokens: int = 512
    """The step's token budget; prompts are cut into chunks to fit."""
    num_threads: int = 1
    num_blocks: int = 512
    prefix_caching: bool = False
    num_lookahead_steps: int = 0


@dataclass(frozen=True)
class Served:
    tokens: Mapping[int, Sequence[int]]
    logits: Logits
    stats: SchedulerStats


def load(model: str, circumstances: Circumstances, **options: Any) -> ModelRunner:
    """Load on the CPU, with a pool of exactly the requested number of blocks."""
    base = runner_options(
        model,
        device="cpu",
        dtype="bfloat16",
        block_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=circumstances.chunk_tokens,
        num_threads=circumstances.num_threads,
    )
    chosen = replace(base, **options)
    source, dtype = resolve_model(model), getattr(torch, chosen.dtype)
    block_bytes = bytes_per_block(open_checkpoint(source, dtype).config, chosen.block_size, dtype)
    runner = load_runner(replace(chosen, kv_cache_bytes=circumstances.num_blocks * block_bytes))
    assert runner.num_blocks == circumstances.num_blocks
    return runner


def serve(
    runner: ModelRunner, load: Load, circumstances: Circumstances, numbers: Sequence[int] | None = None
) -> Served:
    """Serve the requests with these `numbers` together; all by default."""
    sampler = RecordingSampler(runner.vocab_size)
    runner._sampler = sampler
    scheduler = Scheduler(
        scheduler_config(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_num_seqs=32,
            max_model_len=runner.max_model_len,
            max_num_batched_tokens=circumstances.chunk_tokens,
            prefix_caching=circumstances.prefix_caching,
            num_lookahead_steps=circumstances.num_lookahead_steps,
        )
    )
    chosen = range(len(load.prompts)) if numbers is None else numbers
    tokens: dict[int, list[int]] = {number: [] for number in chosen}
    for number in chosen:
        prompt, sampling = tuple(load.prompts[number]), load.sampling(number)
        assert scheduler.add(RequestSpec(str(number), prompt, load.max_tokens, sampling, 0.0), 0.0) is None
    now_s = 0.0
    plans: deque[StepPlan] = deque()
    while scheduler.has_work:
        now_s += 0.01
        while len(plans) <= circumstances.num_lookahead_steps and (plan := scheduler.schedule(now_s)):
            plans.append(plan)
        result = runner.step(plans.popleft())
        # All steps seem to take the same time, so that plans are the same in every run.
        scheduler.update(replace(result, step_time_s=0.01), now_s)
        for update in scheduler.take_updates():
            assert update.error is None
            tokens[int(update.request_id)].extend(update.new_token_ids)
    assert {len(each) for each in tokens.values()} == {load.max_tokens}
    return Served(tokens, sampler.logits, scheduler.stats())
