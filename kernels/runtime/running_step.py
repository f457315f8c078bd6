"""A step in flight: its logits are being sampled, here or on a device."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from kernels.runtime.last_tokens import LastTokens
from scheduler.plan import RowResult, StepPlan, StepResult


class InFlightSample(Protocol):
    """Tokens that a sampler is choosing."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> Sequence[RowResult]:
        """Wait for the results, one per sampling row, in the order of the rows."""
        ...


class FinishedSample:
    """Tokens that were chosen at once."""

    is_done = True

    def __init__(self, results: Sequence[RowResult]) -> None:
        self._results = results

    def wait(self) -> Sequence[RowResult]:
        return self._results


class RunningStep:
    """A step in flight. Step thread only. `wait` records the slots' last tokens; later calls give the same result."""

    def __init__(
        self,
        plan: StepPlan,
        errors: Mapping[int, str],
        sample: InFlightSample,
        last_tokens: LastTokens,
        *,
        started_s: float,
        before: "RunningStep | None",
    ) -> None:
        """errors: by index of rows whose results do not count. before: the previous step on the device."""
        self._plan = plan
        self._errors = errors
        self._sample = sample
        self._last_tokens = last_tokens
        self._started_s = started_s
        self._before = before
        self._result: StepResult | None = None
        self.finished_s = 0.0

    @property
    def is_done(self) -> bool:
        return self._result is not None or self._sample.is_done

    def wait(self) -> StepResult:
        if self._result is None:
            rows = self._collect()
            # If the previous step was still running, this step's time starts where that one's ends.
            begin_s = max(self._started_s, self._before.finished_s if self._before else 0.0)
            self.finished_s, self._before = time.perf_counter(), None
            self._last_tokens.keep(self._plan.step_id, self._plan.rows, rows)
            self._result = StepResult(self._plan.step_id, rows, self.finished_s - begin_s)
        return self._result

    def _collect(self) -> tuple[RowResult, ...]:
        drawn = iter(self._sample.wait())
        results = [
            RowResult(row.request_id) if row.sampling is None else next(drawn) for row in self._plan.rows
        ]
        for idx, error in self._errors.items():
            results[idx] = RowResult(self._plan.rows[idx].request_id, error=error)
        return tuple(results)
