"""The events of a job's stream: start, deltas, end.

Encoding runs for every token, so orjson writes the dataclasses directly. Fields that are None are left out.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import orjson
from pydantic import Field, TypeAdapter

from service.wire.common import (
    STRICT,
    ChoiceIndex,
    Count,
    ErrorInfo,
    FinishReason,
    Id,
    Sha256,
    Status,
    TokenLogprob,
    Usage,
    validated,
)
from service.wire.limits import MAX_CHOICES, MAX_INTEGER, WIRE_VERSION


@dataclass(frozen=True, slots=True)
class Start:
    """Opens an epoch; its seq is always 0."""

    __pydantic_config__ = STRICT

    id: Id
    epoch: Count
    resumed_tokens: Annotated[tuple[Count, ...], Field(max_length=MAX_CHOICES)]
    """For each choice, how many tokens of earlier epochs are kept; this epoch's deltas continue after them."""
    attempt: Count = 0
    worker: str = ""
    seq: Literal[0] = 0
    kind: Literal["start"] = "start"
    v: Literal[1] = WIRE_VERSION


@dataclass(frozen=True, slots=True)
class Delta:
    """Carries new tokens of one choice and the text that may be shown since the delta before.

    `text` may be empty while `token_ids` is not: characters and possible stop strings are held back.
    """

    __pydantic_config__ = STRICT

    id: Id
    epoch: Count
    seq: Count
    index: ChoiceIndex
    text: str
    token_ids: tuple[Count, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """As long as `token_ids` when the job asked for them."""
    kind: Literal["delta"] = "delta"
    v: Literal[1] = WIRE_VERSION


@dataclass(frozen=True, slots=True)
class End:
    """Closes a job's stream; no event of any epoch follows it."""

    __pydantic_config__ = STRICT

    id: Id
    epoch: Count
    seq: Count
    status: Status
    finish_reason: FinishReason | None
    """The finish reason of choice 0; the result has those of the others. None when no choice began."""
    usage: Usage
    events: Annotated[int, Field(ge=1, le=MAX_INTEGER)]
    """Number of events of this epoch, this one included: `seq + 1`."""
    text_sha256: Annotated[tuple[Sha256, ...], Field(max_length=MAX_CHOICES)]
    """For each choice, the hash of the text of all epochs."""
    error: ErrorInfo | None = None
    kind: Literal["end"] = "end"
    v: Literal[1] = WIRE_VERSION


Event = Start | Delta | End

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended, as its end event and its result say it."""

    status: Status
    finish_reason: FinishReason | None
    usage: Usage
    error: ErrorInfo | None = None
    refused: bool = False
    """Nothing of the job was run, and its id stays free for another record."""


def encode_start(event: Start) -> bytes:
    return orjson.dumps(event)


def encode_delta(event: Delta) -> bytes:
    if event.logprobs is not None:
        return orjson.dumps(event)
    return orjson.dumps(
        {
            "v": WIRE_VERSION,
            "id": event.id,
            "epoch": event.epoch,
            "seq": event.seq,
            "kind": "delta",
            "index": event.index,
            "text": event.text,
            "token_ids": event.token_ids,
        }
    )


def encode_end(event: End) -> bytes:
    fields = {name: getattr(event, name) for name in End.__slots__}
    if event.error is None:
        del fields["error"]
    return orjson.dumps(fields)


def encode_event(event: Event) -> bytes:
    if isinstance(event, Delta):
        return encode_delta(event)
    return encode_start(event) if isinstance(event, Start) else encode_end(event)


def parse_event(data: bytes) -> Event:
    """Decode one event. Raises InternalError when it is not one."""
    event: Event = validated(_ADAPTER, data, "event")
    return event


def event_adapter() -> TypeAdapter[Event]:
    return _ADAPTER
