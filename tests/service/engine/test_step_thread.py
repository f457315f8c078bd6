"""The hand-over between event loop and step thread, and whom a failing step hurts."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kernels.grammar import Grammars
from kernels.last_tokens import PREDECESSOR_FAILED
from kernels.runner import FinishedStep, PendingStep
from scheduler.plan import (
    PENDING_TOKEN,
    RowResult,
    SamplingParams,
    ScheduledRow,
    StepPlan,
    StepResult,
)
from service.engine.isolation import run_row_by_row
from service.engine.step_pipeline import StepPipeline
from service.engine.step_thread import StepThread
from service.errors import InternalError


def row(request_id: str) -> ScheduledRow:
    return ScheduledRow(request_id, 0, (1,), 0, (0,), SamplingParams(seed=0), 0)


def pending(request_id: str) -> ScheduledRow:
    return replace(row(request_id), token_ids=(PENDING_TOKEN,), num_generated_tokens=1)


def plan(*request_ids: str) -> StepPlan:
    return StepPlan(
        7, tuple(row(request_id) for request_id in request_ids), released_seats=(3,), block_copies=((1, 2),)
    )


class Scripted:
    """A runner whose `step` is a function of the plan."""

    block_size, num_blocks, vocab_size, max_model_len, eos_token_ids = 16, 4, 10, 64, ()
    prefers_lookahead = False

    def __init__(self, step: Callable[[StepPlan], StepResult]) -> None:
        self.step = step

    def begin(self, plan: StepPlan) -> PendingStep:
        return FinishedStep(self.step(plan))

    def constrain_with(self, grammars: Grammars) -> None:
        pass

    def warmup(self) -> None:
        pass


class Queued(Scripted):
    """Its steps run when they are waited for."""

    def begin(self, plan: StepPlan) -> PendingStep:
        return Waiting(lambda: self.step(plan))


class Waiting:
    is_done = False

    def __init__(self, run: Callable[[], StepResult]) -> None:
        self.wait = run


def answer(step_plan: StepPlan) -> StepResult:
    return StepResult(step_plan.step_id, tuple(RowResult(r.request_id, 5) for r in step_plan.rows), 0.0)


def poisoned_by(*guilty: str) -> Callable[[StepPlan], StepResult]:
    def step(step_plan: StepPlan) -> StepResult:
        if any(r.request_id in guilty for r in step_plan.rows):
            raise ZeroDivisionError("in a kernel")
        return answer(step_plan)

    return step


def test_a_row_that_breaks_the_step_fails_alone() -> None:
    result, num_raised = run_row_by_row(Scripted(poisoned_by("bad")), plan("good", "bad", "fine"), None)
    assert [(r.request_id, r.token_id, r.error is not None) for r in result.rows] == [
        ("good", 5, False),
        ("bad", None, True),
        ("fine", 5, False),
    ]
    assert (result.step_id, num_raised) == (7, 1)


def test_rows_that_run_alone_find_blocks_copied_and_seats_released_whichever_of_them_raises() -> None:
    seen: list[StepPlan] = []

    def step(step_plan: StepPlan) -> StepResult:
        seen.append(step_plan)
        return poisoned_by("bad")(step_plan)

    run_row_by_row(Scripted(step), plan("bad", "good"), None)
    assert [(len(p.rows), p.released_seats, p.block_copies) for p in seen] == [
        (0, (3,), ((1, 2),)),
        (1, (), ()),
        (1, (), ()),
    ]


def test_rows_that_run_alone_get_their_pending_token_from_the_step_before() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def step(step_plan: StepPlan) -> StepResult:
        seen.extend((r.request_id, r.token_ids) for r in step_plan.rows)
        return answer(step_plan)

    before = StepResult(6, (RowResult("a", 9), RowResult("b", error="broken")), 0.0)
    rows = (pending("a"), pending("b"), row("c"))
    result, _ = run_row_by_row(Scripted(step), replace(plan(), rows=rows), before)
    assert seen == [("a", (9,)), ("c", (1,))]
    assert [r.error for r in result.rows] == [None, PREDECESSOR_FAILED, None]


def test_a_step_of_which_no_row_can_run_still_copies_blocks_and_releases_seats() -> None:
    seen: list[StepPlan] = []

    def step(step_plan: StepPlan) -> StepResult:
        seen.append(step_plan)
        return answer(step_plan)

    before = StepResult(6, (RowResult("a", error="broken"),), 0.0)
    run_row_by_row(Scripted(step), replace(plan(), rows=(pending("a"),)), before)
    assert seen == [plan()]


def test_a_step_whose_rows_all_fail_alone_too_is_the_engines_fault_not_the_jobs() -> None:
    with pytest.raises(InternalError, match="all of its 2 rows"):
        run_row_by_row(Scripted(poisoned_by("a", "b")), plan("a", "b"), None)


def test_choices_of_one_job_that_all_fail_are_the_jobs_fault_not_the_engines() -> None:
    rows = tuple(replace(each, group="job#1") for each in plan("a", "b").rows)
    result, num_raised = run_row_by_row(Scripted(poisoned_by("a", "b")), replace(plan(), rows=rows), None)
    assert num_raised == 2
    assert all(each.error for each in result.rows)
    with pytest.raises(InternalError, match="all of its 3 rows, of 2 jobs"):
        run_row_by_row(Scripted(poisoned_by("a", "b", "c")), replace(plan(), rows=(*rows, row("c"))), None)


def test_a_lone_row_that_fails_is_its_own_fault() -> None:
    result, _ = run_row_by_row(Scripted(poisoned_by("a")), plan("a"), None)
    assert result.rows[0].error == "ZeroDivisionError in the model's step"


class Posts:
    """A pipeline, and what it posted so far: (step id, tokens by request) or an error."""

    def __init__(self, runner: Scripted) -> None:
        self.seen: list[tuple[int, dict[str, int | None]] | BaseException] = []
        self.pipeline = StepPipeline(runner, lambda _, value: self._take(value))
        self._loop = asyncio.new_event_loop()

    def begin(self, step_id: int, *rows: ScheduledRow) -> None:
        self.pipeline.begin(StepPlan(step_id, rows), self._loop.create_future())

    def close(self) -> None:
        self._loop.close()

    def _take(self, value: StepResult | BaseException) -> None:
        if isinstance(value, BaseException):
            self.seen.append(value)
        else:
            self.seen.append((value.step_id, {r.request_id: r.token_id for r in value.rows}))


@pytest.fixture
def posts_of() -> Iterator[Callable[[Scripted], Posts]]:
    made: list[Posts] = []

    def make(runner: Scripted) -> Posts:
        made.append(Posts(runner))
        return made[-1]

    yield make
    for posts in made:
        posts.close()


PostsOf = Callable[[Scripted], Posts]


def test_a_step_is_finished_when_the_next_has_begun_or_when_nothing_follows(posts_of: PostsOf) -> None:
    posts = posts_of(Queued(answer))
    posts.begin(0, row("a"))
    assert posts.seen == []
    posts.begin(1, pending("a"))
    assert posts.seen == [(0, {"a": 5})]
    posts.pipeline.flush()
    assert posts.seen == [(0, {"a": 5}), (1, {"a": 5})]
    posts.pipeline.flush()
    assert len(posts.seen) == 2


def test_a_step_that_is_done_at_once_is_not_kept(posts_of: PostsOf) -> None:
    posts = posts_of(Scripted(answer))
    posts.begin(0, row("a"))
    assert posts.seen == [(0, {"a": 5})]


@pytest.mark.parametrize("runner", [Scripted, Queued])
def test_what_is_planned_behind_a_step_that_raised_never_sees_its_state(
    runner: type[Scripted], posts_of: PostsOf
) -> None:
    ran: list[tuple[int, tuple[tuple[str, int], ...]]] = []

    def step(step_plan: StepPlan) -> StepResult:
        if any(r.request_id == "bad" for r in step_plan.rows):
            raise ZeroDivisionError
        ran.append((step_plan.step_id, tuple((r.request_id, r.token_ids[0]) for r in step_plan.rows)))
        return answer(step_plan)

    posts = posts_of(runner(step))
    posts.begin(0, row("good"), row("bad"))
    posts.begin(1, pending("good"), pending("bad"))
    posts.begin(2, pending("good"), row("new"))
    posts.pipeline.flush()
    assert ran == [
        (0, (("good", 1),)),
        (1, (("good", 5),)),
        (2, (("good", PENDING_TOKEN), ("new", 1))),
    ]
    assert posts.seen == [
        (0, {"good": 5, "bad": None}),
        (1, {"good": 5, "bad": None}),
        (2, {"good": 5, "new": 5}),
    ]


@pytest.mark.parametrize("runner", [Scripted, Queued])
def test_behind_a_fault_of_the_engine_nothing_runs_any_more(
    runner: type[Scripted], posts_of: PostsOf
) -> None:
    ran: list[str] = []

    def step(step_plan: StepPlan) -> StepResult:
        ran.extend(r.request_id for r in step_plan.rows)
        raise MemoryError

    posts = posts_of(runner(step))
    posts.begin(0, row("a"), row("b"))
    ran_before = len(ran)
    posts.begin(1, row("c"))
    posts.pipeline.flush()
    posts.begin(2, row("d"))
    first, *others = posts.seen
    assert isinstance(first, InternalError)
    assert others == [first, first]
    assert "d" not in ran
    assert runner is Queued or len(ran) == ran_before


async def test_steps_run_on_one_thread_that_is_not_the_event_loops() -> None:
    threads: set[str] = set()

    def step(step_plan: StepPlan) -> StepResult:
        threads.add(threading.current_thread().name)
        return answer(step_plan)

    step_thread = StepThread(lambda: Scripted(step))
    await step_thread.start()
    for _ in range(3):
        assert (await step_thread.submit(plan("a"))).rows[0].token_id == 5
    await step_thread.stop()
    assert threads == {"step"}


async def test_what_loading_raises_reaches_whoever_starts_it() -> None:
    def load() -> Scripted:
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        await StepThread(load).start()


async def test_stop_waits_for_the_step_that_is_running() -> None:
    entered, leave = threading.Event(), threading.Event()

    def step(step_plan: StepPlan) -> StepResult:
        entered.set()
        leave.wait(5)
        return answer(step_plan)

    step_thread = StepThread(lambda: Scripted(step))
    await step_thread.start()
    running = step_thread.submit(plan("a"))
    await asyncio.to_thread(entered.wait, 5)
    stopping = asyncio.create_task(step_thread.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    leave.set()
    await stopping
    assert running.done()


async def test_a_step_that_is_out_on_a_device_comes_back_with_flush_and_with_stop() -> None:
    step_thread = StepThread(lambda: Queued(answer))
    await step_thread.start()
    first = step_thread.submit(plan("a"))
    step_thread.flush()
    assert (await first).rows[0].token_id == 5
    last = step_thread.submit(plan("b"))
    await step_thread.stop()
    assert (await last).rows[0].token_id == 5
