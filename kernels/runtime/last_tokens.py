"""What PENDING_TOKEN stands for: the token that the step before sampled at a seat. Step thread only; no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from scheduler.plan import RowResult, SamplingParams, ScheduledRow

PREDECESSOR_FAILED = "the step before failed for this row"

_ANYTHING = SamplingParams(seed=0, temperature=0.0)
"""For a row whose result does not matter: needs no state of its seat."""


@dataclass(slots=True)
class _Seat:
    """Its newest sampling row."""

    step_id: int
    is_awaited: bool = True
    token_id: int | None = None
    """None: the row failed, or is awaited."""


@dataclass(slots=True)
class Resolved:
    """By index of the pending rows in a plan. A row that never sampled before is in neither."""

    token_ids: dict[int, int] = field(default_factory=dict)
    """-1 - seat: only the device knows it yet. 0 for a row whose predecessor failed."""
    errors: dict[int, str] = field(default_factory=dict)


class LastTokens:
    """By seat; bounded by the number of seats."""

    def __init__(self) -> None:
        self._seats: dict[int, _Seat] = {}

    def release(self, seats: Iterable[int]) -> None:
        for seat in seats:
            self._seats.pop(seat, None)

    def expect(self, step_id: int, rows: Sequence[ScheduledRow]) -> None:
        """The step of these sampling rows has begun: it decides from now on what their seats' last tokens are."""
        for row in rows:
            self._seats[row.seat] = _Seat(step_id)

    def keep(self, step_id: int, rows: Sequence[ScheduledRow], results: Sequence[RowResult]) -> None:
        """Their results; of a seat where a later step has begun since, nothing is kept."""
        for row, result in zip(rows, results, strict=True):
            seat = self._seats.get(row.seat)
            if row.sampling is not None and seat is not None and seat.step_id == step_id:
                seat.is_awaited, seat.token_id = False, None if result.error else result.token_id

    def resolve(self, rows: Sequence[ScheduledRow]) -> Resolved:
        resolved = Resolved()
        for idx, row in enumerate(rows):
            if len(row.token_ids) > 1:
                break  # rows of one token come first
            seat = self._seats.get(row.seat) if row.is_pending else None
            if seat is None:
                continue
            if seat.is_awaited:
                resolved.token_ids[idx] = -1 - row.seat
            elif seat.token_id is None:
                resolved.token_ids[idx], resolved.errors[idx] = 0, PREDECESSOR_FAILED
            else:
                resolved.token_ids[idx] = seat.token_id
        return resolved

    def known(self, row: ScheduledRow) -> ScheduledRow:
        """The row as it would have been planned after the step before; unchanged where only the device knows."""
        seat = self._seats.get(row.seat) if row.is_pending else None
        if seat is None or seat.is_awaited:
            return row
        if seat.token_id is None:
            return replace(row, token_ids=(0,), sampling=_ANYTHING)
        return replace(row, token_ids=(seat.token_id,))
