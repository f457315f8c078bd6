"""Drives a Runner with a minimal scheduler whose decisions the test makes."""

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.runner import PendingStep, Runner
from scheduler.plan import RowResult, SamplingParams, ScheduledRow, StepPlan, TokenLogprobs
from scheduler.scheduler import Scheduler
from scheduler.spec import RequestUpdate
from tests.support.configs import scheduler_config

GREEDY = SamplingParams(seed=0, temperature=0.0)


@dataclass
class Generation:
    """One request; ends after `max_tokens` or in an error, whatever it samples."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: str | None = None
    slot: int = -1
    blocks: tuple[int, ...] = ()
    num_computed: int = 0
    has_history: bool = False

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    @property
    def ended(self) -> bool:
        return self.error is not None or len(self.tokens) >= self.max_tokens

    def apply(self, row: ScheduledRow, result: RowResult) -> None:
        self.num_computed += len(row.token_ids)
        self.error = result.error
        if result.token_id is not None:
            self.tokens.append(result.token_id)
            self.logprobs.append(result.logprobs)


class Driver:
    """Gives every request a slot and scattered blocks at once, decodes first, prompts in chunks."""

    def __init__(self, runner: Runner, *, chunk_tokens: int = 1 << 30, seed: int = 0) -> None:
        self.runner = runner
        self.chunk_tokens = chunk_tokens
        self.free_blocks = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.running: list[Generation] = []
        self.released: list[int] = []
        self.step_id = 0

    def add(self, *generations: Generation) -> None:
        for generation in generations:
            taken = {other.slot for other in self.running}
            generation.slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            num_blocks = -(-(len(generation.prompt) + generation.max_tokens) // self.runner.block_size)
            generation.blocks = tuple(self.free_blocks.pop() for _ in range(num_blocks))
            generation.num_computed, generation.has_history = 0, False
            self.running.append(generation)

    def remove(self, generation: Generation) -> None:
        """End or preempt a request: frees its blocks and slot, keeps what it has generated."""
        self.running.remove(generation)
        self.free_blocks.extend(generation.blocks)
        self.released.append(generation.slot)

    def plan(self) -> StepPlan:
        rows = [self._row(generation) for generation in self.running]
        rows.sort(key=lambda row: len(row.token_ids) > 1)
        plan = StepPlan(self.step_id, tuple(rows), released_slots=tuple(self.released))
        self.released = []
        self.step_id += 1
        return plan

    def step(self) -> None:
        plan = self.plan()
        by_id = {generation.request_id: generation for generation in self.running}
        results = self.runner.step(plan)
        assert results.step_id == plan.step_id
        for row, result in zip(plan.rows, results.rows, strict=True):
            assert row.request_id == result.request_id
            by_id[row.request_id].apply(row, result)
        for generation in [generation for generation in self.running if generation.ended]:
            self.remove(generation)

    def run(self) -> None:
        while self.running:
            self.step()

    def _row(self, generation: Generation) -> ScheduledRow:
        known = generation.known
        end = min(len(known), generation.num_computed + self.chunk_tokens)
        samples = end == len(known)
        history = None
        if samples and generation.sampling.needs_history and not generation.has_history:
            history = (tuple(generation.prompt), tuple(generation.tokens))
            generation.has_history = True
        return ScheduledRow(
            request_id=generation.request_id,
            slot=generation.slot,
            token_ids=tuple(known[generation.num_computed : end]),
            num_computed_tokens=generation.num_computed,
            block_table=generation.blocks[: -(-end // self.runner.block_size)],
            sampling=generation.sampling if samples else None,
            num_generated_tokens=len(generation.tokens),
            history=history,
        )


def scheduler_for(runner: Runner, **settings: Any) -> Scheduler:
    """A scheduler for all of the runner's blocks."""
    return Scheduler(
        scheduler_config(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_model_len=runner.max_model_len,
            **settings,
        )
    )


def updates_of(scheduler: Scheduler, runner: Runner) -> Iterator[RequestUpdate]:
    """Run until nothing is left, beginning each step in the order that the step thread does."""
    in_flight: deque[PendingStep] = deque()
    now_s = 0.0
    while scheduler.has_work or in_flight:
        now_s += 0.01
        while len(in_flight) <= scheduler.config.num_lookahead_steps:
            plan = scheduler.schedule(now_s)
            if plan is None:
                break
            in_flight.append(runner.begin(plan))
        if in_flight:
            scheduler.update(in_flight.popleft().wait(), now_s)
        yield from scheduler.take_updates()


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    chunk_tokens: int = 1 << 30,
) -> list[Generation]:
    """Generate for all prompts, together in one batch from the first step on."""
    per_prompt = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    generations = [
        Generation(str(idx), prompt, max_tokens, params)
        for idx, (prompt, params) in enumerate(zip(prompts, per_prompt, strict=True))
    ]
    driver = Driver(runner, chunk_tokens=chunk_tokens)
    driver.add(*generations)
    driver.run()
    return generations


def tokens_of(generations: Sequence[Generation]) -> Mapping[str, list[int]]:
    assert [generation.error for generation in generations] == [None] * len(generations)
    return {generation.request_id: generation.tokens for generation in generations}
