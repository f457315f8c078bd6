"""The terminal record of a job, as it stands on the results topic."""

from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import TypeAdapter

from service.wire.common import (
    STRICT,
    Count,
    ErrorInfo,
    FinishReason,
    Id,
    Status,
    TokenLogprob,
    Usage,
    validated,
)
from service.wire.limits import WIRE_VERSION


@dataclass(frozen=True, slots=True)
class Choice:
    __pydantic_config__ = STRICT

    index: Count
    text: str
    finish_reason: FinishReason | None
    token_ids: tuple[Count, ...] | None = None
    """The generated ids, a final stop id included, when the job asked for them."""
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds; None where the job did not get that far."""

    __pydantic_config__ = STRICT

    queued_s: float | None = None
    """From the record's arrival to its first step."""
    ttft_s: float | None = None
    """From arrival to the first token."""
    tpot_s: float | None = None
    """Mean time per token after the first."""
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class SloOutcome:
    """None where there was no target or nothing to hold against it."""

    __pydantic_config__ = STRICT

    ttft_met: bool | None = None
    tpot_met: bool | None = None


@dataclass(frozen=True, slots=True)
class Result:
    __pydantic_config__ = STRICT

    id: Id
    status: Status
    attempt: Count
    worker: str
    choices: tuple[Choice, ...] = ()
    usage: Usage = Usage()  # noqa: RUF009 - frozen, so it may be shared
    timings: Timings = Timings()
    slo: SloOutcome = SloOutcome()
    error: ErrorInfo | None = None
    metadata: dict[str, Any] | None = None
    """The job's, unchanged."""
    custom_id: str | None = None
    """The batch line's, unchanged; the id is made from it where it is no id by itself."""
    v: Literal[1] = WIRE_VERSION

    def encode(self) -> bytes:
        """As JSON; optional fields that are None are left out."""
        choices = [
            {
                name: value
                for name in Choice.__slots__
                if (value := getattr(choice, name)) is not None or name == "finish_reason"
            }
            for choice in self.choices
        ]
        fields = {name: getattr(self, name) for name in Result.__slots__}
        fields["choices"] = choices
        for name in ("error", "custom_id"):
            if fields[name] is None:
                del fields[name]
        return orjson.dumps(fields)


_ADAPTER: TypeAdapter[Result] = TypeAdapter(Result)


def parse_result(data: bytes) -> Result:
    """Decode a result; InternalError when it is none."""
    result: Result = validated(_ADAPTER, data, "result")
    return result


def result_adapter() -> TypeAdapter[Result]:
    return _ADAPTER
