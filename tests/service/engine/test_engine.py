"""The scheduler coroutine over the real scheduler and the deterministic runner."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kernels.deterministic import DeterministicOptions, DeterministicRunner
from scheduler.config import SchedulerConfig
from scheduler.plan import SamplingParams, StepPlan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.spec import FinishReason, RequestSpec, RequestUpdate
from service.engine import Engine, StepThread
from service.errors import InternalError


class Recorder:
    """What the engine reported, and events to wait for."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.changed = asyncio.Event()

    def __call__(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            self.tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
            if update.finish is not None:
                assert update.request_id not in self.finished, "ended twice"
                self.finished[update.request_id] = update.finish
        self.changed.set()

    async def until_finished(self, *request_ids: str) -> None:
        async with asyncio.timeout(10):
            while not set(request_ids) <= self.finished.keys():
                await self.changed.wait()
                self.changed.clear()


def spec(request_id: str, max_tokens: int = 5, **fields: object) -> RequestSpec:
    values = {
        "prompt_token_ids": (1, 2, 3),
        "sampling": SamplingParams(seed=0, temperature=0),
        "arrival_s": 0.0,
    }
    return RequestSpec(request_id, max_tokens=max_tokens, **(values | fields))  # type: ignore[arg-type]


@asynccontextmanager
async def engine(recorder: Recorder, runner: object = None) -> AsyncIterator[Engine]:
    step_thread = StepThread(lambda: runner or DeterministicRunner(DeterministicOptions(num_blocks=64)))  # type: ignore[arg-type, return-value]
    loaded = await step_thread.start()
    config = SchedulerConfig(num_blocks=64, block_size=loaded.block_size, max_num_seqs=8, max_model_len=512)
    running = Engine(Scheduler(config), step_thread, recorder)
    task = asyncio.create_task(running.run())
    try:
        yield running
    finally:
        running.stop()
        try:
            await task
        finally:
            await step_thread.stop()


async def test_requests_that_come_at_any_time_are_served_and_the_idle_engine_wakes() -> None:
    recorder = Recorder()
    async with engine(recorder) as running:
        assert running.add(spec("a")) is None
        await recorder.until_finished("a")
        assert running.add(spec("b", max_tokens=9)) is None
        await recorder.until_finished("b")
    assert {name: len(tokens) for name, tokens in recorder.tokens.items()} == {"a": 5, "b": 9}
    assert recorder.tokens["a"] == recorder.tokens["b"][:5], "the same prompt must give the same tokens"


async def test_a_request_ended_from_outside_ends_once_and_its_neighbour_goes_on() -> None:
    recorder = Recorder()
    async with engine(recorder) as running:
        running.add(spec("long", max_tokens=400))
        running.add(spec("short", max_tokens=20))
        while not recorder.tokens.get("long"):
            await recorder.changed.wait()
            recorder.changed.clear()
        assert running.finish("long", FinishReason.CANCELLED)
        assert not running.finish("unknown", FinishReason.CANCELLED)
        await recorder.until_finished("long", "short")
        stats = running.scheduler.stats()
    assert recorder.finished == {"long": FinishReason.CANCELLED, "short": FinishReason.LENGTH}
    assert stats.held_blocks == 0


async def test_an_impossible_request_is_refused_with_the_limit_and_nobody_else_is_hurt() -> None:
    recorder = Recorder()
    async with engine(recorder) as running:
        rejection = running.add(spec("huge", max_tokens=10_000))
        assert rejection is not None
        assert (rejection.field, rejection.value, rejection.limit) == ("prompt + max_tokens", 10_003, 512)
        running.add(spec("fine"))
        await recorder.until_finished("fine")
    assert "huge" not in recorder.finished


async def test_an_engine_whose_every_step_fails_says_so_instead_of_failing_the_jobs() -> None:
    class Broken(DeterministicRunner):
        def step(self, plan: StepPlan) -> StepResult:
            raise MemoryError

    step_thread = StepThread(lambda: Broken(DeterministicOptions(num_blocks=64)))
    await step_thread.start()
    config = SchedulerConfig(num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=512)
    recorder = Recorder()
    broken = Engine(Scheduler(config), step_thread, recorder)
    broken.add(spec("a"))
    broken.add(spec("b"))
    with pytest.raises(InternalError, match="all of its 2 rows"):
        await broken.run()
    await step_thread.stop()
    assert recorder.finished == {}


async def test_the_next_plan_is_handed_over_before_the_last_steps_tokens_are_delivered() -> None:
    order: list[str] = []

    class Watched(DeterministicRunner):
        def step(self, plan: StepPlan) -> StepResult:
            order.append(f"step {plan.step_id}")
            return super().step(plan)

    step_thread = StepThread(lambda: Watched(DeterministicOptions(num_blocks=64)))
    loaded = await step_thread.start()
    config = SchedulerConfig(num_blocks=64, block_size=loaded.block_size, max_num_seqs=8, max_model_len=512)
    done = asyncio.Event()
    submitted: list[int] = []
    submit = step_thread.submit

    def watched_submit(plan: StepPlan) -> "asyncio.Future[StepResult]":
        submitted.append(plan.step_id)
        return submit(plan)

    step_thread.submit = watched_submit  # type: ignore[method-assign]
    seen: list[tuple[int, int]] = []

    def on_updates(updates: Sequence[RequestUpdate]) -> None:
        seen.append((len(seen), submitted[-1]))
        if any(update.finish for update in updates):
            done.set()

    running = Engine(Scheduler(config), step_thread, on_updates)
    task = asyncio.create_task(running.run())
    running.add(spec("a", max_tokens=4))
    async with asyncio.timeout(10):
        await done.wait()
    running.stop()
    await task
    await step_thread.stop()
    # Tokens of step k are delivered when k + 1 is already out; the last ones have no successor.
    assert seen == [(0, 1), (1, 2), (2, 3), (3, 3)]
