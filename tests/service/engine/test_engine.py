"""The scheduler coroutine over the real scheduler and the deterministic runner."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kernels.deterministic import DeterministicOptions, DeterministicRunner, expected_tokens
from kernels.runner import FinishedStep, Runner
from scheduler.plan import SamplingParams, StepPlan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.spec import FinishReason, RequestSpec, RequestUpdate
from service.engine import Engine, StepThread
from service.errors import InternalError
from tests.service.engine.runners import OPTIONS, PoisonedRunner, QueuedRunner
from tests.support.configs import scheduler_config


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


@dataclass(frozen=True)
class Mode:
    num_lookahead_steps: int
    make_runner: Callable[[DeterministicOptions], DeterministicRunner]

    def scheduler(self, runner: Runner) -> Scheduler:
        return Scheduler(
            scheduler_config(
                num_blocks=64,
                block_size=runner.block_size,
                max_num_seqs=8,
                max_model_len=512,
                num_lookahead_steps=self.num_lookahead_steps,
            )
        )


MODES = {
    "plain": Mode(0, PoisonedRunner),
    "lookahead": Mode(1, PoisonedRunner),
    "device": Mode(0, QueuedRunner),
    "device-lookahead": Mode(1, QueuedRunner),
}


@pytest.fixture(params=MODES.values(), ids=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@asynccontextmanager
async def engine(mode: Mode, recorder: Recorder) -> AsyncIterator[Engine]:
    step_thread = StepThread(lambda: mode.make_runner(OPTIONS))
    running = Engine(mode.scheduler(await step_thread.start()), step_thread, recorder)
    task = asyncio.create_task(running.run())
    try:
        yield running
    finally:
        running.stop()
        try:
            await task
        finally:
            await step_thread.stop()


async def test_requests_that_come_at_any_time_are_served_and_the_idle_engine_wakes(mode: Mode) -> None:
    recorder = Recorder()
    async with engine(mode, recorder) as running:
        assert running.add(spec("a")) is None
        await recorder.until_finished("a")
        assert running.add(spec("b", max_tokens=9)) is None
        await recorder.until_finished("b")
    assert {name: len(tokens) for name, tokens in recorder.tokens.items()} == {"a": 5, "b": 9}
    assert recorder.tokens["a"] == recorder.tokens["b"][:5], "the same prompt must give the same tokens"


async def test_a_request_ended_by_its_caller_ends_once_and_the_other_continues(mode: Mode) -> None:
    recorder = Recorder()
    async with engine(mode, recorder) as running:
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


async def test_an_impossible_request_is_refused_with_the_limit_and_affects_no_other(mode: Mode) -> None:
    recorder = Recorder()
    async with engine(mode, recorder) as running:
        rejection = running.add(spec("huge", max_tokens=10_000))
        assert rejection is not None
        assert (rejection.field, rejection.value, rejection.limit) == ("prompt + max_tokens", 10_003, 512)
        running.add(spec("fine"))
        await recorder.until_finished("fine")
    assert "huge" not in recorder.finished


async def test_requests_of_one_batch_give_the_same_tokens_in_every_mode(mode: Mode) -> None:
    recorder = Recorder()
    prompts = {f"r{i}": tuple(range(40 + i, 45 + 7 * i)) for i in range(12)}
    async with engine(mode, recorder) as running:
        for i, (name, prompt) in enumerate(prompts.items()):
            running.add(spec(name, max_tokens=5 + 3 * i, prompt_token_ids=prompt))
            await asyncio.sleep(0)
        await recorder.until_finished(*prompts)
        stats = running.scheduler.stats()
    for i, (name, prompt) in enumerate(prompts.items()):
        assert recorder.tokens[name] == list(expected_tokens(prompt, 5 + 3 * i))
    assert stats.held_blocks == stats.num_leaving == 0


async def test_a_row_that_breaks_its_steps_ends_alone_whatever_is_planned_next(mode: Mode) -> None:
    recorder = Recorder()
    async with engine(mode, recorder) as running:
        for name in ("good", "bad", "fine"):
            running.add(spec(name, max_tokens=12))
        await recorder.until_finished("good", "bad", "fine")
        running.add(spec("later"))
        await recorder.until_finished("later")
    assert recorder.finished.pop("bad") is FinishReason.ERROR
    assert set(recorder.finished.values()) == {FinishReason.LENGTH}
    expected = list(expected_tokens((1, 2, 3), 12))
    assert recorder.tokens["good"] == recorder.tokens["fine"] == expected
    assert recorder.tokens["bad"] == expected[:3]
    assert recorder.tokens["later"] == expected[:5]


async def test_an_engine_whose_every_row_fails_raises_and_runs_no_later_plan(mode: Mode) -> None:
    recorder = Recorder()
    step_thread = StepThread(lambda: mode.make_runner(OPTIONS))
    running = Engine(mode.scheduler(await step_thread.start()), step_thread, recorder)
    running.add(spec("bad1", max_tokens=9))
    running.add(spec("bad2", max_tokens=9))
    with pytest.raises(InternalError, match="all of its 2 rows"):
        await running.run()
    late = step_thread.submit(StepPlan(99, ()))
    with pytest.raises(InternalError, match="all of its 2 rows"):
        await late
    await step_thread.stop()
    assert recorder.finished == {}
    assert {len(tokens) for tokens in recorder.tokens.values()} <= {2, 3}


async def test_stopping_waits_for_every_step_in_flight(mode: Mode) -> None:
    recorder = Recorder()
    async with engine(mode, recorder) as running:
        running.add(spec("a", max_tokens=400))
        while not recorder.tokens.get("a"):
            await recorder.changed.wait()
            recorder.changed.clear()
        running.stop()
    num_steps = running.scheduler.stats().num_steps
    assert len(recorder.tokens["a"]) == num_steps


async def test_a_second_step_begins_on_a_device_before_the_first_is_waited_for() -> None:
    runner = QueuedRunner()
    recorder = Recorder()
    async with engine(Mode(1, lambda _: runner), recorder) as running:
        running.add(spec("a", max_tokens=30))
        await recorder.until_finished("a")
    assert runner.most_begun == 2
    assert not runner.begun


@pytest.mark.parametrize("num_lookahead_steps", [0, 1])
async def test_the_next_plan_is_handed_over_before_the_last_steps_tokens_are_delivered(
    num_lookahead_steps: int,
) -> None:
    mode = Mode(num_lookahead_steps, DeterministicRunner)
    step_thread = StepThread(lambda: mode.make_runner(OPTIONS))
    loaded = await step_thread.start()
    done = asyncio.Event()
    submitted: list[int] = []
    submit = step_thread.submit

    def watched_submit(plan: StepPlan) -> "asyncio.Future[StepResult]":
        submitted.append(plan.step_id)
        return submit(plan)

    step_thread.submit = watched_submit  # type: ignore[method-assign]
    seen: list[tuple[int, int]] = []

    def on_updates(updates: Sequence[RequestUpdate]) -> None:
        delivered = sum(len(update.new_token_ids) for update in updates) + (seen[-1][0] if seen else 0)
        seen.append((delivered, len(submitted)))
        if any(update.finish for update in updates):
            done.set()

    running = Engine(mode.scheduler(loaded), step_thread, on_updates)
    task = asyncio.create_task(running.run())
    running.add(spec("a", max_tokens=40))
    async with asyncio.timeout(10):
        await done.wait()
    running.stop()
    await task
    await step_thread.stop()
    # Tokens of step k are delivered when its successors are already out; the last ones have none.
    assert seen[-1] == (40, 40)
    assert all(
        num_submitted >= min(40, delivered + 1 + num_lookahead_steps) for delivered, num_submitted in seen
    )


async def test_a_request_that_arrives_while_one_step_is_in_flight_is_planned_at_once() -> None:
    """With one step in flight there is room for another: a new request does not wait for the result."""
    entered, leave = threading.Event(), threading.Event()

    class Gated(DeterministicRunner):
        def begin(self, plan: StepPlan) -> FinishedStep:
            if plan.step_id == 0:
                entered.set()
                leave.wait(10)
            return super().begin(plan)

    mode = Mode(1, Gated)
    recorder = Recorder()
    step_thread = StepThread(lambda: mode.make_runner(OPTIONS))
    running = Engine(mode.scheduler(await step_thread.start()), step_thread, recorder)
    submit, second = step_thread.submit, asyncio.Event()

    def watched_submit(plan: StepPlan) -> "asyncio.Future[StepResult]":
        if plan.step_id == 1:
            second.set()
        return submit(plan)

    step_thread.submit = watched_submit  # type: ignore[method-assign]
    task = asyncio.create_task(running.run())
    running.add(spec("a", max_tokens=1))
    await asyncio.to_thread(entered.wait, 10)
    running.add(spec("b", max_tokens=1))
    async with asyncio.timeout(10):
        await second.wait()
    assert recorder.finished == {}, "the first step has not returned"
    leave.set()
    await recorder.until_finished("a", "b")
    running.stop()
    await task
    await step_thread.stop()
