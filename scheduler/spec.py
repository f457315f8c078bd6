"""What the service asks of the scheduler and what it is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from scheduler.plan import SamplingParams, TokenLogprobs


class ServiceClass(StrEnum):
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


CLASS_RANK = {ServiceClass.INTERACTIVE: 0, ServiceClass.STANDARD: 1, ServiceClass.BATCH: 2}
NUM_CLASSES = len(CLASS_RANK)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One generation to run. Times are seconds on the caller's monotonic clock."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    arrival_s: float
    stop_token_ids: frozenset[int] = frozenset()
    """Sampling one of these ends the request with STOP; the id itself is part of the output ids."""
    generated_token_ids: tuple[int, ...] = ()
    """Tokens of earlier attempts that stand: they count towards max_tokens and are not reported again."""
    service_class: ServiceClass = ServiceClass.STANDARD
    ttft_s: float | None = None
    """Target; None takes the class's default."""
    tpot_s: float | None = None
    deadline_s: float | None = None
    """Past it the request ends EXPIRED."""
    tenant: str = ""
    fork_group: str | None = None
    """Requests that name the same group have the same prompt, tenant and class; it is computed once for all."""

    def finish_reason(self, generated: Sequence[int]) -> FinishReason | None:
        """What these output tokens mean for the request; None: it goes on.

        A grammar's text can be complete before `min_tokens`. The sampler bans stop ids until then except where
        nothing else may follow, so with a grammar one that was sampled ends the request whenever it comes.
        """
        num_least = 0 if self.sampling.grammar is not None else self.sampling.min_tokens
        if len(generated) > num_least and generated[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(generated) >= self.max_tokens else None


def due_time_s(arrival_s: float, ttft_s: float | None, rank: int, ageing_s: float) -> float:
    """Place in the queue, as a time: class, slack to the TTFT target and ageing in one number.

    Slack is due time minus now, and now is the same for all, so the order never has to be computed again.
    Within `ageing_s` classes are strict; a request that waited that much longer than one of the next
    higher class comes before it, so none starves.
    """
    patience_s = ageing_s if ttft_s is None else min(ttft_s, ageing_s)
    return arrival_s + patience_s + rank * ageing_s


def relegated_due_s(due_s: float, ageing_s: float) -> float:
    """Behind every class that is due at the same time."""
    return due_s + NUM_CLASSES * ageing_s


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why `Scheduler.add` refused; a value, because it is the job's fault and nobody else's."""

    field: str
    value: int | float | str
    limit: int | float | str
    message: str


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What happened to one request since it was last reported."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """As long as new_token_ids when the request asked for log-probabilities, else empty."""
    finish: FinishReason | None = None
    """Set exactly once, in the request's last update."""
    error: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache, in every update; a fork's are those of whose prompt it shares."""
