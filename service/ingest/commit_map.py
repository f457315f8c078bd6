"""Encodes offsets completed beyond the committed one as text that fits the metadata of a Kafka offset commit.

Layout: `tailrace1:` + base64url of CRC-32 (big-endian, over the committed offset and the payload) and payload. The
payload is LEB128 numbers in pairs: incomplete offsets to step over, then completed ones. The first pair starts at the
committed offset. The checksum covers the offset, so a map is never read against an offset that a tool has moved.
"""

import base64
import binascii
import zlib
from collections.abc import Iterable, Sequence

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
