"""The hand-over between event loop and step thread, and whom a failing step hurts."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from kernels.grammar import Grammars
from scheduler.plan import RowResult, SamplingParams, ScheduledRow, StepPlan, StepResult
from service.engine.step_thread import StepThread, step_isolated
from service.errors import InternalError


def row(request_id: str) -> ScheduledRow:
    return ScheduledRow(request_id, 0, (1,), 0, (0,), SamplingParams(seed=0), 0)


def plan(*request_ids: str) -> StepPlan:
    return StepPlan(
        7, tuple(row(request_id) for request_id in request_ids), released_seats=(3,), block_copies=((1, 2),)
    )


class Scripted:
    """A runner whose `step` is a function of the plan."""

    block_size, num_blocks, vocab_size, max_model_len, eos_token_ids = 16, 4, 10, 64, ()

    def __init__(self, step: Callable[[StepPlan], StepResult]) -> None:
        self.step = step

    def constrain_with(self, grammars: Grammars) -> None:
        pass

    def warmup(self) -> None:
        pass


def answer(step_plan: StepPlan) -> StepResult:
    return StepResult(step_plan.step_id, tuple(RowResult(r.request_id, 5) for r in step_plan.rows), 0.0)


def poisoned_by(*guilty: str) -> Callable[[StepPlan], StepResult]:
    def step(step_plan: StepPlan) -> StepResult:
        if any(r.request_id in guilty for r in step_plan.rows):
            raise ZeroDivisionError("in a kernel")
        return answer(step_plan)

    return step


def test_a_row_that_breaks_the_step_fails_alone() -> None:
    result = step_isolated(Scripted(poisoned_by("bad")), plan("good", "bad", "fine"))
    assert [(r.request_id, r.token_id, r.error is not None) for r in result.rows] == [
        ("good", 5, False),
        ("bad", None, True),
        ("fine", 5, False),
    ]
    assert result.step_id == 7


def test_rows_that_run_alone_copy_blocks_and_release_seats_once() -> None:
    seen: list[StepPlan] = []

    def step(step_plan: StepPlan) -> StepResult:
        seen.append(step_plan)
        return poisoned_by("bad")(step_plan)

    step_isolated(Scripted(step), plan("bad", "good"))
    assert [(p.released_seats, p.block_copies) for p in seen[1:]] == [((3,), ((1, 2),)), ((), ())]


def test_a_step_whose_rows_all_fail_alone_too_is_the_engines_fault_not_the_jobs() -> None:
    with pytest.raises(InternalError, match="all of its 2 rows"):
        step_isolated(Scripted(poisoned_by("a", "b")), plan("a", "b"))


def test_a_lone_row_that_fails_is_its_own_fault() -> None:
    result = step_isolated(Scripted(poisoned_by("a")), plan("a"))
    assert result.rows[0].error == "ZeroDivisionError in the model's step"


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
