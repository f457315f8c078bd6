"""Tracks which offsets of one partition are complete. Pure: no clock, no I/O, no Kafka."""

from collections import OrderedDict
from collections.abc import Iterator

from service.ingest.commit_map import (
    MAX_METADATA_BYTES,
    Ranges,
    encode_completed,
    payload_capacity,
    varint_size,
)

PRESSURE_BYTES = payload_capacity(MAX_METADATA_BYTES * 3 // 4)
"""Backpressure starts when the map could grow past three quarters of what a commit may carry."""


class PartitionOffsets:
    """Tracks incomplete offsets so that what is committed never passes the first of them.

    Only incomplete offsets are stored: memory follows the work in flight, not how far the rest ran ahead.
    Everything below `next_offset` that is not incomplete is complete or does not exist (compaction,
    transaction markers), and what does not exist is never delivered, so the map may list it as complete.
    """

    def __init__(self, start: int, completed: Ranges = ()) -> None:
        """Starts at the committed offset `start`, the first one that may be incomplete.

        `completed` is the restored map beyond it: those offsets are fetched again and not to be delivered
        again.
        """
        self.next_offset = start
        """Offsets below are settled or in flight, those from here on unknown or restored."""
        self.position = start
        """One past the last record seen. It is below next_offset inside a restored range, whose records may still
        arrive; none arrives from below it unless the log itself was cut back."""
        self._incomplete: OrderedDict[int, int] = OrderedDict()
        """Offset to record timestamp (ms), ascending."""
        self._restored = list(reversed(completed))
        """Restored ranges at or above next_offset; the lowest is last."""
        self._payload_bound: int | None = None
        self._skip_restored()

    @property
    def num_incomplete(self) -> int:
        return len(self._incomplete)

    @property
    def head_timestamp_ms(self) -> int | None:
        """Timestamp of the first incomplete record."""
        return next(iter(self._incomplete.values()), None)

    def is_incomplete(self, offset: int) -> bool:
        return offset in self._incomplete

    def register(self, offset: int, timestamp_ms: int = 0) -> bool:
        """Marks a fetched record incomplete; False: it is in flight or complete already, and is not to be delivered."""
        self.position = max(self.position, offset + 1)
        if offset < self.next_offset:
            return False
        self.next_offset = offset
        self._skip_restored()
        if offset < self.next_offset:
            return False
        self._incomplete[offset] = timestamp_ms
        self.next_offset = offset + 1
        self._skip_restored()
        self._payload_bound = None
        return True

    def complete(self, offset: int) -> bool:
        """Marks an offset complete; False: it was not incomplete (completed twice, or never delivered)."""
        if self._incomplete.pop(offset, None) is None:
            return False
        self._payload_bound = None
        return True

    def advance(self, position: int) -> None:
        """Notes that no record exists between the last one registered and `position` (markers at the log's end)."""
        if position > self.next_offset:
            self.next_offset = position
            self._skip_restored()
            self._payload_bound = None

    def committable(self) -> tuple[int, str]:
        """Returns the offset to commit, which is the first incomplete one, and the map of what is complete beyond."""
        offset = next(iter(self._incomplete), self.next_offset)
        return offset, encode_completed(offset, self.completed_beyond())

    def completed_beyond(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges of complete offsets above the first incomplete one."""
        previous = None
        for offset in self._incomplete:
            if previous is not None and offset > previous + 1:
                yield previous + 1, offset
            previous = offset
        if previous is not None and self.next_offset > previous + 1:
            yield previous + 1, self.next_offset
        yield from reversed(self._restored)

    @property
    def under_pressure(self) -> bool:
        """Whether completions of what is in flight could make the map outgrow three quarters of its limit.

        Counts the worst that can come, not the map of now: a dense run of incomplete offsets costs nothing
        until every second one completes.
        """
        if self._payload_bound is None:
            self._payload_bound = len(self._incomplete) + sum(
                varint_size(end - first) + 1 for first, end in self.completed_beyond()
            )
        return self._payload_bound >= PRESSURE_BYTES

    def _skip_restored(self) -> None:
        """Steps over restored ranges that next_offset has reached or passed."""
        while self._restored and self._restored[-1][0] <= self.next_offset:
            _, end = self._restored.pop()
            self.next_offset = max(self.next_offset, end)
