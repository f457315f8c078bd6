"""The scheduler coroutine: plan, hand over, deliver what the last step made, wait for the result, repeat."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler.plan import StepPlan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.spec import FinishReason, Rejection, RequestSpec, RequestUpdate
from service.engine.step_thread import StepThread


class StepObserver(Protocol):
    """Sees every step on the event loop, after its result came back. Must be quick: the step thread waits."""

    def __call__(self, plan: StepPlan, result: StepResult) -> None: ...


def _ignore_step(plan: StepPlan, result: StepResult) -> None:
    del plan, result


IDLE_POLL_S = 0.05
"""How often requests that wait although nothing runs are looked at again: only deadlines can move them."""


class Engine:
    """Owns the scheduler; lives on the event loop. Every method is to be called there.

    The order in one round is what keeps the device busy: the next plan is handed over *before* the tokens of the
    last step are detokenized and published, so that work overlaps with the step.
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
        self._wake = asyncio.Event()
        self._stopping = False
        self.last_progress_s = clock()
        """When a step last came back, or the engine was last idle: what readiness and the watchdog look at."""

    def add(self, spec: RequestSpec) -> Rejection | None:
        """Queue one request, or say why it can never run."""
        rejection = self.scheduler.add(spec, self._clock())
        self._wake.set()
        return rejection

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request in whatever state it is; False when it is not known (any more)."""
        known = self.scheduler.finish(request_id, reason, self._clock())
        self._wake.set()
        return known

    def stop(self) -> None:
        """Ask `run` to return after the step in flight."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Run steps until `stop()`. Raises what the step thread raised when a whole step failed."""
        while not self._stopping:
            plan = self.scheduler.schedule(self._clock())
            running = self._step_thread.submit(plan) if plan is not None else None
            self._deliver()
            if plan is None or running is None:
                await self._idle()
                continue
            result = await running
            self.scheduler.update(result, self._clock())
            self.last_progress_s = self._clock()
            self._on_step(plan, result)
        self._deliver()

    def _deliver(self) -> None:
        updates = self.scheduler.take_updates()
        if updates:
            self._on_updates(updates)

    async def _idle(self) -> None:
        """Wait for work. With requests waiting but none runnable, look again soon: a deadline may have passed."""
        if not self.scheduler.has_work:
            self.last_progress_s = self._clock()
            await self._wake.wait()
        else:
            try:
                async with asyncio.timeout(IDLE_POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                return
        self._wake.clear()
