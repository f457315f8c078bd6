"""Values that events and results share, and how single tokens are named beside their log-probabilities."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from service.errors import InternalError, JobError
from service.wire import limits

STRICT: Final = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Status = Literal["completed", "failed", "rejected", "expired", "cancelled"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
Count = Annotated[int, Field(ge=0, le=limits.MAX_INTEGER)]
ChoiceIndex = Annotated[int, Field(ge=0, lt=limits.MAX_CHOICES)]
"""Bounded, because readers make room for every choice up to it."""
Id = Annotated[str, Field(pattern=limits.ID_PATTERN)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

_Shown = str | Annotated[int, Field(ge=-limits.MAX_INTEGER - 1, le=2 * limits.MAX_INTEGER + 1)] | float | None

_BYTES: Final = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)\Z")
MIN_LOGPROB: Final = -9999.0
"""Replaces minus infinity, which JSON cannot write."""


@dataclass(frozen=True, slots=True)
class Usage:
    __pydantic_config__ = STRICT

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    """Tokens of all choices and all epochs."""
    cached_tokens: Count = 0
    """Prompt tokens taken from the prefix cache."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Says why a job did not complete, with the field, its value and the limit where they apply."""

    __pydantic_config__ = STRICT

    code: str
    message: str
    field: str | None = None
    value: _Shown = None
    limit: _Shown = None

    @classmethod
    def of(cls, error: JobError) -> "ErrorInfo":
        return cls(error.code, error.message, error.field, error.value, error.limit)


@dataclass(frozen=True, slots=True)
class TopLogprob:
    __pydantic_config__ = STRICT

    token: str
    token_id: Count
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token's natural-log probability and those of the likeliest alternatives, likeliest first.

    `token` is its text, or `bytes:\\xe2\\x80` where a character is split over several tokens.
    """

    __pydantic_config__ = STRICT

    token: str
    token_id: Count
    logprob: float
    top: tuple[TopLogprob, ...] = ()


def token_name(data: bytes) -> str:
    """Return the text of a token's bytes; for a part of a character, which has no text, OpenAI's `bytes:\\xe2\\x80`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(name: str) -> bytes:
    """Return the bytes that `token_name` was given."""
    match = _BYTES.match(name)
    return bytes.fromhex(match[1].replace("\\x", "")) if match else name.encode()


def distinct_names(tokens: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Return different names by id: of tokens that share a name, the first keeps it and the others add their ids.

    `A` as a piece and `A` as a byte are two tokens, with a log-probability each.
    """
    names: dict[int, str] = {}
    taken: set[str] = set()
    for token_id, name in tokens:
        if token_id in names:
            continue
        while name in taken:
            name += f" (token_id:{token_id})"
        taken.add(name)
        names[token_id] = name
    return names


def finite_logprob(logprob: float) -> float:
    """Return `logprob`, or MIN_LOGPROB where JSON has no number for it (minus infinity, NaN)."""
    return max(MIN_LOGPROB, logprob)  # in this order: max(a, NaN) is a


def text_sha256(pieces: Iterable[str]) -> str:
    """Hash a choice's whole text, given in any number of pieces."""
    hasher = hashlib.sha256()
    for piece in pieces:
        hasher.update(piece.encode())
    return hasher.hexdigest()


def as_written(value: dict[str, Any]) -> dict[str, Any]:
    """Return a free-form object. Raises ValueError for one that would change if it were written and read again: readers
    of JSON take NaN and integers of any length, and its writers do not."""
    try:
        same = orjson.loads(orjson.dumps(value)) == value
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not same:
        raise ValueError("a number is not finite")
    return value


def validated(adapter: TypeAdapter[Any], data: bytes, what: str) -> Any:
    """Decode what this service itself wrote. Raises InternalError when it does not match the format."""
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or what
        raise InternalError(f"{what}: {place}: {first['msg']}") from None
