"""Dead letters: records that could not be run, with headers that say where each came from and why."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from service.errors import InternalError
from service.wire import limits

HEADER_PREFIX = "tailrace-dl-"

Headers = list[tuple[str, bytes | None]]
"""Kafka allows a header without a value, which is not an empty one."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Says where a dead letter came from and why; each field is a header, `tailrace-dl-<name>`."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    """The original record's timestamp, from which a deadline in seconds counts."""
    attempt: int
    code: str
    message: str

    def headers(self) -> Headers:
        return [(header_name(part.name), _bounded(str(getattr(self, part.name)))) for part in fields(Origin)]


def header_name(field: str) -> str:
    return HEADER_PREFIX + field.replace("_", "-")


def _bounded(text: str) -> bytes:
    # Cut between characters: half a character is not UTF-8.
    return text.encode()[: limits.MAX_ERROR_MESSAGE_BYTES].decode(errors="ignore").encode()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    """The original record's headers."""
    origin: Origin

    def record_headers(self) -> Headers:
        """Return the headers of the record on the dead-letter topic: the original's, then ours."""
        return [*self.headers, *self.origin.headers()]

    def replay(self) -> tuple[bytes | None, bytes | None, Headers]:
        """Return key, value and headers to publish again on the jobs topic: exactly the original's."""
        return self.key, self.value, list(self.headers)


def _integer(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise InternalError(f"{name}: {text[: limits.MAX_SHOWN_CHARS]!r} is not an integer") from None
    if abs(number) > limits.MAX_INTEGER:
        raise InternalError(f"{name}: {text[: limits.MAX_SHOWN_CHARS]!r} is not an integer of 64 bits")
    return number


def parse_dead_letter(
    key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
) -> DeadLetter:
    """Read a record of the dead-letter topic. Raises InternalError when its last headers are not ours.

    Only the last headers are ours, so an original that has headers of such names comes back unchanged.
    """
    names = [header_name(part.name) for part in fields(Origin)]
    own = headers[len(headers) - len(names) :] if len(headers) >= len(names) else []
    if [name for name, _ in own] != names:
        found = ", ".join(name for name, _ in headers)[:200]
        raise InternalError(f"headers: {found or 'none'} do not end in {names[0]} … {names[-1]}")
    values: dict[str, Any] = {}
    for part, (name, data) in zip(fields(Origin), own, strict=True):
        if data is None:
            raise InternalError(f"{name}: null is no value of a dead letter's header")
        text = data.decode(errors="replace")
        values[part.name] = _integer(name, text) if part.type in (int, "int") else text
    return DeadLetter(key, value, tuple(headers[: -len(names)]), Origin(**values))
