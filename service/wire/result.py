"""The outcome of a job, as written to the results topic."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, Field, TypeAdapter

from service.wire.common import (
    STRICT,
    ChoiceIndex,
    Count,
    ErrorInfo,
    FinishReason,
    Id,
    Status,
    TokenLogprob,
    Usage,
    as_written,
    validated,
)
from service.wire.limits import MAX_CHOICES, WIRE_VERSION


@dataclass(frozen=True, slots=True)
class Choice:
    __pydantic_config__ = STRICT

    index: ChoiceIndex
    text: str
    finish_reason: FinishReason | None
    token_ids: tuple[Count, ...] | None = None
    """The generated ids, a final stop id included, when the job asked for them."""
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Times in seconds; None where the job did not get that far."""

    __pydantic_config__ = STRICT

    queued_s: float | None = None
    """Time from the record's arrival to its first step."""
    ttft_s: float | None = None
    """Time from arrival to the first token."""
    tpot_s: float | None = None
    """Mean time per token after the first."""
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class SloOutcome:
    """Says whether the job met its targets; None where there was no target or nothing to measure."""

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
    choices: Annotated[tuple[Choice, ...], Field(max_length=MAX_CHOICES)] = ()
    usage: Usage = Usage()  # noqa: RUF009 - frozen, so it may be shared
    timings: Timings = Timings()
    slo: SloOutcome = SloOutcome()
    error: ErrorInfo | None = None
    metadata: Annotated[dict[str, Any], AfterValidator(as_written)] | None = None
    """The job's metadata, unchanged."""
    custom_id: str | None = None
    """The batch line's custom_id, unchanged; the job's id derives from it where it is not a valid id itself."""
    v: Literal[1] = WIRE_VERSION

    def encode(self) -> bytes:
        """Write as JSON; optional fields that are None are left out."""
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
    """Decode a result. Raises InternalError when it is not one."""
    result: Result = validated(_ADAPTER, data, "result")
    return result


def result_adapter() -> TypeAdapter[Result]:
    return _ADAPTER
