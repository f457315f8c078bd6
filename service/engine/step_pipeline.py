"""Steps on the step thread: each is finished when the next one has begun, or when nothing follows."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

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
