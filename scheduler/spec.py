"""What the service passes to the scheduler and what it gets back: request, rejection and update; queue order."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from scheduler.plan import SamplingParams, TokenLogprobs


class ServiceClass(StrEnum):
    """Priority of a request, highest first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


CLASS_RANK = {ServiceClass.INTERACTIVE: 0, ServiceClass.STANDARD: 1, ServiceClass.BATCH: 2}
"""0 is the highest class."""
NUM_CLASSES = len(CLASS_RANK)


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One generation to run. All times are seconds; points in time are on the caller's monotonic clock."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    arrival_s: float
    stop_token_ids: frozenset[int] = frozenset()
    """Sampling one of these ends the request with STOP; the sampled id is part of the output."""
    generated_token_ids: tuple[int, ...] = ()
    """Output tokens kept from earlier attempts: they count towards max_tokens and are not reported again."""
    service_class: ServiceClass = ServiceClass.STANDARD
    ttft_s: float | None = None
    """Target for the time to the first token; None: the default of the class."""
    tpot_s: float | None = None
    """Target for the time per output token; None: the default of the class."""
    deadline_s: float | None = None
    """The request ends with EXPIRED at this time; None: never."""
    tenant: str = ""
    fork_group: str | None = None
    """Requests of one group have the same prompt, tenant and class; the prompt is computed once for all of them."""

    def finish_reason(self, generated: Sequence[int]) -> FinishReason | None:
        """Return why these output tokens end the request; None: it continues.

        With a grammar, a stop id ends the request even before `min_tokens`: the sampler bans stop ids until then,
        except where the grammar allows no other token because its text is complete.
        """
        num_least = 0 if self.sampling.grammar is not None else self.sampling.min_tokens
        if len(generated) > num_least and generated[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(generated) >= self.max_tokens else None


def due_time_s(arrival_s: float, ttft_s: float | None, rank: int, ageing_s: float) -> float:
    """Return the key that orders the waiting queue: class, slack to the TTFT target and ageing as one point in time.

    Slack is the due time minus now, and now is the same for all requests, so the order never has to be computed
    again. Classes are strict for `ageing_s` seconds; a request that has waited that much longer than one of the next
    higher class goes first, so no request starves.
    """
    slack_s = ageing_s if ttft_s is None else min(ttft_s, ageing_s)
    return arrival_s + slack_s + rank * ageing_s


def relegated_due_s(due_s: float, ageing_s: float) -> float:
    """Return a due time after that of every class for the same arrival."""
    return due_s + NUM_CLASSES * ageing_s


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why `Scheduler.add` refused a request: the field, its value and the limit it exceeds."""

    field: str
    value: int | float | str
    limit: int | float | str
    message: str


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What happened to one request since its previous update."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per new token if the request asked for log-probabilities, else empty."""
    finish: FinishReason | None = None
    """Set exactly once, in the request's last update."""
    error: str | None = None
    """What failed, with finish ERROR."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, repeated in every update. A fork reports the count of its lender."""
