"""The scheduler coroutine: plan, hand over, deliver the last step's tokens, wait for a result, repeat."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler.plan import StepPlan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.spec import FinishReason, Rejection, RequestSpec, RequestUpdate
from service.engine.step_thread import StepThread


class StepObserver(Protocol):
    """Sees every step on the event loop, after its result. Must be quick: the step thread waits."""

    def __call__(self, plan: StepPlan, result: StepResult) -> None: ...


def _ignore_step(plan: StepPlan, result: StepResult) -> None:
    del plan, result


IDLE_POLL_S = 0.05
"""How often waiting requests are checked when nothing runs: only a deadline can end the wait."""


class Engine:
    """Owns the scheduler. All methods must be called on the event loop.

    The order in one round is what keeps the device busy: the next plan is handed over *before* the tokens of the
    last step are detokenized and published, so that work overlaps with the step. With look-ahead one more step is in
    flight by then, so that the device does not wait for the planning either.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_thread: StepThread,
        on_updates: Callable[[Sequence[RequestUpdate]], None],
        *,
        on_step: StepObserver = _ignore_step,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self._step_thread = step_thread
        self._on_updates = on_updates
        self._on_step = on_step
        self._clock = clock
        self._max_in_flight = scheduler.config.num_lookahead_steps + 1
        self._in_flight: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        """Plans without a result yet, in the order of their steps."""
        self._is_flushed = False
        """The step thread knows that no plan follows the newest of them yet."""
        self._wake = asyncio.Event()
        self._stopping = False
        self.last_progress_s = clock()
        """When a step last returned, or the engine was last idle; read by readiness and the watchdog."""

    def add(self, spec: RequestSpec) -> Rejection | None:
        """Queue one request, or say why it can never run."""
        rejection = self.scheduler.add(spec, self._clock())
        self._wake.set()
        return rejection

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request in any state; False when it is unknown or has ended."""
        known = self.scheduler.finish(request_id, reason, self._clock())
        self._wake.set()
        return known

    def stop(self) -> None:
        """Ask `run` to return after the steps in flight."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Run steps until `stop()`. Raises what the step thread raised when a whole step failed."""
        try:
            while not self._stopping:
                self._wake.clear()  # the next plan takes every earlier wake-up into account
                self._plan_ahead()
                self._deliver()
                if self._in_flight:
                    await self._take_results()
                else:
                    await self._idle()
            while self._in_flight:
                self._flush()
                await self._take_results()
            self._deliver()
        finally:
            self._abandon()

    def _plan_ahead(self) -> None:
        """Hand over plans until the next one depends on a result."""
        while len(self._in_flight) < self._max_in_flight:
            plan = self.scheduler.schedule(self._clock())
            if plan is None:
                break
            future = self._step_thread.submit(plan)
            future.add_done_callback(self._wake_up)
            self._in_flight.append((plan, future))
            self._is_flushed = False
        self._flush()

    def _flush(self) -> None:
        """Make the thread finish a step that no other one follows; it finishes the first of two when the second has
        begun."""
        if len(self._in_flight) == 1 and not self._is_flushed:
            self._step_thread.flush()
            self._is_flushed = True

    async def _take_results(self) -> None:
        """Wait for the oldest result, or for anything that may make another plan possible; handle the results."""
        if len(self._in_flight) < self._max_in_flight and not self._stopping:
            await self._wake.wait()
        else:
            await self._in_flight[0][1]
        while self._in_flight and self._in_flight[0][1].done():
            plan, future = self._in_flight.popleft()
            result = future.result()
            self.scheduler.update(result, self._clock())
            self.last_progress_s = self._clock()
            self._on_step(plan, result)

    def _wake_up(self, future: "asyncio.Future[StepResult]") -> None:
        del future
        self._wake.set()

    def _abandon(self) -> None:
        """Retrieve errors of steps in flight, which are no longer awaited: asyncio would report them otherwise."""
        for _, future in self._in_flight:
            if not future.cancel() and not future.cancelled():
                future.exception()
        self._in_flight.clear()

    def _deliver(self) -> None:
        updates = self.scheduler.take_updates()
        if updates:
            self._on_updates(updates)

    async def _idle(self) -> None:
        """Wait for work. With requests waiting but none runnable, look again soon: a deadline may have passed."""
        if not self.scheduler.has_work:
            self.last_progress_s = self._clock()
            await self._wake.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_POLL_S):
                await self._wake.wait()
