"""Tracks which offsets of one partition are complete. Pure: no clock, no I/O, no Kafka.

Offsets completed beyond the committed one travel as text in the metadata of the offset commit. Layout: `tailrace1:` +
base64url of CRC-32 (big-endian, over the committed offset and the payload) and payload. The payload is LEB128 numbers
in pairs: incomplete offsets to step over, then completed ones. The first pair starts at the committed offset. The
checksum covers the offset, so a map is never read against an offset that a tool has moved.
"""

import base64
import binascii
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

Ranges = tuple[tuple[int, int], ...]
"""Completed offsets as half-open (first, end) pairs, ascending, disjoint, not adjacent."""

MAX_METADATA_BYTES = 4096
"""The broker's default offset.metadata.max.bytes."""

_PREFIX = "tailrace1:"
_CRC_BYTES = 4


def payload_capacity(limit_bytes: int = MAX_METADATA_BYTES) -> int:
    """Returns how many payload bytes fit a text of `limit_bytes` (base64 spends four characters on three bytes)."""
    return max(0, (limit_bytes - len(_PREFIX)) // 4 * 3 - _CRC_BYTES)


def varint_size(number: int) -> int:
    return max(1, (number.bit_length() + 6) // 7)


def encode_completed(
    committed: int, ranges: Iterable[tuple[int, int]], limit_bytes: int = MAX_METADATA_BYTES
) -> str:
    """Encodes as many leading ranges as fit; what is left out is only done again, never lost. No range: empty
    text."""
    payload = bytearray()
    capacity = payload_capacity(limit_bytes)
    position = committed
    for first, end in ranges:
        assert position < first < end, (position, first, end)
        if len(payload) + varint_size(first - position) + varint_size(end - first) > capacity:
            break
        _append_varint(payload, first - position)
        _append_varint(payload, end - first)
        position = end
    if not payload:
        return ""
    body = _checksum(committed, payload).to_bytes(_CRC_BYTES, "big") + payload
    return _PREFIX + base64.urlsafe_b64encode(body).decode("ascii")


def decode_completed(committed: int, metadata: str | None) -> Ranges | None:
    """Reads a map back; None for anything that this program did not write for exactly this offset."""
    if not metadata or not metadata.startswith(_PREFIX) or len(metadata) > MAX_METADATA_BYTES:
        return None
    try:
        body = base64.b64decode(metadata[len(_PREFIX) :].encode("ascii"), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError):
        return None
    payload = body[_CRC_BYTES:]
    if not payload or int.from_bytes(body[:_CRC_BYTES], "big") != _checksum(committed, payload):
        return None
    numbers = _read_varints(payload)
    if numbers is None or len(numbers) % 2 or 0 in numbers:
        return None
    ranges = []
    position = committed
    for incomplete, complete in zip(numbers[::2], numbers[1::2], strict=True):
        first = position + incomplete
        position = first + complete
        ranges.append((first, position))
    return tuple(ranges)


def _checksum(committed: int, payload: bytes | bytearray) -> int:
    return zlib.crc32(payload, zlib.crc32(committed.to_bytes(8, "big", signed=True)))


def _append_varint(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _read_varints(payload: bytes) -> Sequence[int] | None:
    numbers = []
    number = shift = 0
    for byte in payload:
        number |= (byte & 0x7F) << shift
        shift += 7
        if shift > 63:
            return None
        if not byte & 0x80:
            numbers.append(number)
            number = shift = 0
    return numbers if shift == 0 else None


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
