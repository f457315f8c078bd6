"""The thread that owns the model: plans in, results out, one hand-over each way per step."""

import asyncio
import queue
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import TypeVar

import structlog

from kernels.runner import Runner
from scheduler.plan import StepPlan, StepResult
from service.engine.step_pipeline import StepPipeline

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
