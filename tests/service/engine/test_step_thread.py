"""The hand-over between event loop and step thread."""

import asyncio
import threading

import pytest

from scheduler.plan import StepPlan, StepResult
from service.engine.step_thread import StepThread
from tests.service.engine.scripted import Queued, Scripted, answer, plan


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


async def test_an_error_in_loading_reaches_the_caller_of_start() -> None:
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


async def test_flush_and_stop_finish_a_step_in_flight_on_a_device() -> None:
    step_thread = StepThread(lambda: Queued(answer))
    await step_thread.start()
    first = step_thread.submit(plan("a"))
    step_thread.flush()
    assert (await first).rows[0].token_id == 5
    last = step_thread.submit(plan("b"))
    await step_thread.stop()
    assert (await last).rows[0].token_id == 5
