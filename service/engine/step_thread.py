"""The thread that owns the model: plans in, results out, one hand-over each way per step.

On it each step is finished when the next one has begun, or when nothing follows.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple, TypeVar

import structlog

from kernels.runner import PendingStep, Runner
from scheduler.plan import StepPlan, StepResult
from service.engine.isolation import run_row_by_row

log = structlog.get_logger(__name__)

Post = Callable[["asyncio.Future[StepResult]", StepResult | BaseException], None]


class _Begun(NamedTuple):
    plan: StepPlan
    future: "asyncio.Future[StepResult]"
    pending: PendingStep


class StepPipeline:
    """Keeps at most one step that has begun and is not finished, so that a device always has the next one queued.

    A step that raises is run row by row before the next one counts. If that shows the engine to be at fault, no later
    step runs: each gets the same error.
    """

    def __init__(self, runner: Runner, post: Post) -> None:
        self._runner = runner
        self._post = post
        self._begun: _Begun | None = None
        self._before: StepResult | None = None
        """Result of the last finished step."""
        self._is_slot_stale = False
        """A row of it raised, so the runner's state for its slot is from an earlier step."""
        self._fault: BaseException | None = None

    def begin(self, plan: StepPlan, future: "asyncio.Future[StepResult]") -> None:
        """Start a step, then finish the previous one; its own result may follow at once or with a later call."""
        if self._fault is not None:
            self._post(future, self._fault)
            return
        if self._begun is None and self._is_slot_stale and any(row.is_pending for row in plan.rows):
            # Planned before a row of the previous step was known to raise: no runner has the state after such a row.
            self._run_row_by_row(plan, future)
            return
        pending = self._start(plan)
        former, self._begun = self._begun, None
        if former is not None and not self._finish(former, following=pending):
            self.begin(plan, future)
        elif pending is None:
            self._run_row_by_row(plan, future)
        elif pending.is_done:
            self._finish(_Begun(plan, future, pending))
        else:
            self._begun = _Begun(plan, future, pending)

    def flush(self) -> None:
        """Finish the step that has begun: none follows yet."""
        former, self._begun = self._begun, None
        if former is not None:
            self._finish(former)

    def fail(self, error: BaseException) -> None:
        """End the step in flight and all later ones with this error."""
        self._fault = error
        if self._begun is not None:
            self._post(self._begun.future, error)
            self._begun = None

    def _start(self, plan: StepPlan) -> PendingStep | None:
        """None: it raised."""
        try:
            return self._runner.begin(plan)
        except Exception:
            log.exception("step failed", step_id=plan.step_id, num_rows=len(plan.rows))
            return None

    def _finish(self, begun: _Begun, following: PendingStep | None = None) -> bool:
        """False: it raised, and the step that began after it has to begin again."""
        try:
            result = begun.pending.wait()
        except Exception:
            log.exception("step failed", step_id=begun.plan.step_id, num_rows=len(begun.plan.rows))
            if following is not None:
                _drain(following)
            self._run_row_by_row(begun.plan, begun.future)
            return False
        self._deliver(begun.future, result, has_raised=False)
        return True

    def _run_row_by_row(self, plan: StepPlan, future: "asyncio.Future[StepResult]") -> None:
        try:
            result, num_raised = run_row_by_row(self._runner, plan, self._before)
        except Exception as error:
            self._fault = error
            self._post(future, error)
            return
        self._deliver(future, result, has_raised=num_raised > 0)

    def _deliver(self, future: "asyncio.Future[StepResult]", result: StepResult, *, has_raised: bool) -> None:
        self._before, self._is_slot_stale = result, has_raised
        self._post(future, result)


def _drain(pending: PendingStep) -> None:
    """Finish a step whose result does not count."""
    try:
        pending.wait()
    except Exception:
        log.debug("step dropped", reason="it began behind one that failed")


T = TypeVar("T")

log = structlog.get_logger(__name__)


class _Signal(Enum):
    FLUSH = auto()
    """No plan follows for now: finish the steps in flight."""
    STOP = auto()


class StepThread:
    """Loads a runner and runs its steps, strictly in order, on a separate thread.

    The event loop hands over frozen plans and gets a future for each; a result comes back through a single
    `call_soon_threadsafe`. Only this thread uses tensors and the runner. It waits for messages and for the device,
    never for a timeout: a step is finished when the next one has begun, or on `flush`.
    """

    def __init__(self, load: Callable[[], Runner]) -> None:
        self._load = load
        self._messages: queue.SimpleQueue[tuple[StepPlan, asyncio.Future[StepResult]] | _Signal] = (
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
        """Hand over one plan (event loop). At most two may be without a result; that of the last one comes only after
        the next plan or `flush`."""
        assert self._loop is not None, "start() comes first"
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._messages.put((plan, future))
        return future

    def flush(self) -> None:
        """Finish all plans so far: no other can be made before their results (event loop)."""
        self._messages.put(_Signal.FLUSH)

    async def stop(self) -> None:
        """End the thread after the steps that were handed over; returns when it has ended."""
        if self._thread is None:
            return
        self._messages.put(_Signal.STOP)
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
        pipeline = StepPipeline(runner, self._post)
        while (message := self._messages.get()) is not _Signal.STOP:
            if isinstance(message, _Signal):
                pipeline.flush()
                continue
            try:
                pipeline.begin(*message)
            except BaseException as error:
                pipeline.fail(error)
                self._post(message[1], error)
        pipeline.flush()

    def _post(self, future: "asyncio.Future[T]", value: T | BaseException) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_settle, future, value)
        except RuntimeError:
            # The loop is closed: the process is ending, and this step is not awaited any more.
            log.debug("step result dropped", reason="event loop closed")


def _settle(future: "asyncio.Future[T]", value: T | BaseException) -> None:
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
