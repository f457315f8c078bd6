"""Reads what the product wrote to the servers, by the published formats and not by the product's code."""

import base64
from collections.abc import Iterator

MAP_PREFIX = "tailrace1:"


def decode_map(committed: int, metadata: str) -> Iterator[tuple[int, int]]:
    """Yields the half-open ranges of offsets that a commit's metadata lists as complete."""
    if not metadata.startswith(MAP_PREFIX):
        return
    payload = base64.urlsafe_b64decode(metadata[len(MAP_PREFIX) :])[4:]
    numbers: list[int] = []
    number = shift = 0
    for byte in payload:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    position = committed
    for incomplete, complete in zip(numbers[::2], numbers[1::2], strict=True):
        first = position + incomplete
        position = first + complete
        yield first, position


def job_id_of(key: bytes) -> str | None:
    """The job whose key or channel this is; None for any other one, and for the probes of new connections."""
    begin, end = key.find(b"{"), key.rfind(b"}")
    if begin < 0 or key[begin + 1 : begin + 2] == b"?":
        return None
    return key[begin + 1 : end].decode()
