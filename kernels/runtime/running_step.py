"""A step in flight, whose logits are being sampled here or on a device, and the tokens it leaves to the next step.

Step thread only; no torch.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from scheduler.plan import RowResult, SamplingParams, ScheduledRow, StepPlan, StepResult

PREDECESSOR_FAILED = "the step before failed for this row"

_ANYTHING = SamplingParams(seed=0, temperature=0.0)
"""Sampling for a row whose result does not matter; needs no state of the slot."""


@dataclass(slots=True)
class _Slot:
    """The newest sampling row of a slot."""

    step_id: int
    is_awaited: bool = True
    token_id: int | None = None
    """None: the row failed, or is awaited."""


@dataclass(slots=True)
class Resolved:
    """Tokens and errors by index of the pending rows in a plan. A row that never sampled before is in neither."""

    token_ids: dict[int, int] = field(default_factory=dict)
    """-1 - slot: only the device knows it yet. 0 for a row whose predecessor failed."""
    errors: dict[int, str] = field(default_factory=dict)


class LastTokens:
    """Last tokens by slot; bounded by the number of slots."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    def expect(self, step_id: int, rows: Sequence[ScheduledRow]) -> None:
        """The step of these sampling rows has begun; from now on it determines their slots' last tokens."""
        for row in rows:
            self._slots[row.slot] = _Slot(step_id)

    def keep(self, step_id: int, rows: Sequence[ScheduledRow], results: Sequence[RowResult]) -> None:
        """Keep the results of a step, except for slots for which a later step has begun since."""
        for row, result in zip(rows, results, strict=True):
            slot = self._slots.get(row.slot)
            if row.sampling is not None and slot is not None and slot.step_id == step_id:
                slot.is_awaited, slot.token_id = False, None if result.error else result.token_id

    def resolve(self, rows: Sequence[ScheduledRow]) -> Resolved:
        resolved = Resolved()
        for idx, row in enumerate(rows):
            if len(row.token_ids) > 1:
                break  # rows of one token come first
            slot = self._slots.get(row.slot) if row.is_pending else None
            if slot is None:
                continue
            if slot.is_awaited:
                resolved.token_ids[idx] = -1 - row.slot
            elif slot.token_id is None:
                resolved.token_ids[idx], resolved.errors[idx] = 0, PREDECESSOR_FAILED
            else:
                resolved.token_ids[idx] = slot.token_id
        return resolved

    def known(self, row: ScheduledRow) -> ScheduledRow:
        """The row as it would be planned after the previous step; unchanged if only the device knows the token."""
        slot = self._slots.get(row.slot) if row.is_pending else None
        if slot is None or slot.is_awaited:
            return row
        if slot.token_id is None:
            return replace(row, token_ids=(0,), sampling=_ANYTHING)
        return replace(row, token_ids=(slot.token_id,))


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
