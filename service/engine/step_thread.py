"""The thread that owns the model: plans in, results out, one hand-over each way per step."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from kernels.runner import Runner
from scheduler.plan import RowResult, ScheduledRow, StepPlan, StepResult
from service.errors import InternalError

T = TypeVar("T")

log = structlog.get_logger(__name__)


class StepThread:
    """Loads a runner and runs its steps, one at a time, on a thread of its own.

    The event loop hands over a frozen plan and gets a future; the result comes back through a single
    `call_soon_threadsafe`. Tensors, and the runner itself, are touched by this thread alone.
    """

    def __init__(self, load: Callable[[], Runner]) -> None:
        self._load = load
        self._plans: queue.SimpleQueue[tuple[StepPlan, asyncio.Future[StepResult]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> Runner:
        """Load the runner and return it, for its sizes only. Raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Runner] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(loaded,), name="step", daemon=True)
        self._thread.start()
        return await loaded

    def submit(self, plan: StepPlan) -> "asyncio.Future[StepResult]":
        """Hand over one plan (event loop). The previous one's future must be done: steps do not queue up."""
        assert self._loop is not None, "start() comes first"
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._plans.put((plan, future))
        return future

    async def stop(self) -> None:
        """End the thread after the step that is running; returns when it has ended."""
        if self._thread is None:
            return
        self._plans.put(None)
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    def _main(self, loaded: "asyncio.Future[Runner]") -> None:
        assert self._loop is not None
        try:
            runner = self._load()
        except BaseException as error:
            self._post(loaded, error)
            return
        self._post(loaded, runner)
        while (item := self._plans.get()) is not None:
            plan, future = item
            try:
                self._post(future, step_isolated(runner, plan))
            except BaseException as error:
                self._post(future, error)

    def _post(self, future: "asyncio.Future[T]", value: T | BaseException) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_settle, future, value)
        except RuntimeError:
            # The loop is closed: the process is on its way out and nobody waits for this step.
            log.debug("step result dropped", reason="event loop closed")


def _settle(future: "asyncio.Future[T]", value: T | BaseException) -> None:
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)


def step_isolated(runner: Runner, plan: StepPlan) -> StepResult:
    """One step; if it raises, each row again by itself, so that only the guilty ones fail.

    Writing a token's K/V twice leaves the same K/V, and sampling draws from a counter RNG, so a row that ran in
    the failed step gives the same token when it runs again.
    """
    started = time.perf_counter()
    try:
        return runner.step(plan)
    except Exception:
        log.exception("step failed", step_id=plan.step_id, num_rows=len(plan.rows))
    rows = [_step_alone(runner, plan, row, first=i == 0) for i, row in enumerate(plan.rows)]
    if len(rows) > 1 and all(row.error for row in rows):
        # Not a row's fault but the engine's: out of memory, a lost device. Ending every job would be a lie.
        raise InternalError(f"step {plan.step_id}: all of its {len(rows)} rows failed, together and alone")
    return StepResult(plan.step_id, tuple(rows), time.perf_counter() - started)


def _step_alone(runner: Runner, plan: StepPlan, row: ScheduledRow, *, first: bool) -> RowResult:
    alone = StepPlan(
        plan.step_id,
        (row,),
        released_seats=plan.released_seats if first else (),
        block_copies=plan.block_copies if first else (),
    )
    try:
        return runner.step(alone).rows[0]
    except Exception as error:
        return RowResult(row.request_id, error=f"{type(error).__name__} in the model's step")
