"""A step of a model that has begun: its logits are being sampled, here or on a device."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from kernels.runtime.last_tokens import LastTokens
from scheduler.plan import RowResult, StepPlan, StepResult


class PendingSample(Protocol):
    """Tokens that a sampler has begun to choose."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> Sequence[RowResult]:
        """One per sampling row, in their order."""
        ...


class FinishedSample:
    """Tokens that were chosen when the choice began."""

    is_done = True

    def __init__(self, results: Sequence[RowResult]) -> None:
        self._results = results

    def wait(self) -> Sequence[RowResult]:
        return self._results


class RunningStep:
    """Step thread only. `wait` tells the seats' last tokens; more than once it gives the same result."""

    def __init__(
        self,
        plan: StepPlan,
        errors: Mapping[int, str],
        sample: PendingSample,
        last_tokens: LastTokens,
        *,
        begun_s: float,
        before: "RunningStep | None",
    ) -> None:
        """errors: by index of rows whose results do not count. before: what the device does first."""
        self._plan = plan
        self._errors = errors
        self._sample = sample
        self._last_tokens = last_tokens
        self._begun_s = begun_s
        self._before = before
        self._result: StepResult | None = None
        self.finished_s = 0.0

    @property
    def is_done(self) -> bool:
        return self._result is not None or self._sample.is_done

    def wait(self) -> StepResult:
        if self._result is None:
            rows = self._collect()
            # Begun while the step before still ran, its own time starts where that one's ends.
            started_s = max(self._begun_s, self._before.finished_s if self._before else 0.0)
            self.finished_s, self._before = time.perf_counter(), None
            self._last_tokens.keep(self._plan.step_id, self._plan.rows, rows)
            self._result = StepResult(self._plan.step_id, rows, self.finished_s - started_s)
        return self._result

    def _collect(self) -> tuple[RowResult, ...]:
        drawn = iter(self._sample.wait())
        results = [
            RowResult(row.request_id) if row.sampling is None else next(drawn) for row in self._plan.rows
        ]
        for idx, error in self._errors.items():
            results[idx] = RowResult(self._plan.rows[idx].request_id, error=error)
        return tuple(results)
