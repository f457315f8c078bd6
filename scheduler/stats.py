"""What the scheduler tells about itself: values for metrics, readiness and the watchdog."""

from dataclasses import dataclass
from enum import StrEnum

from scheduler.step_time import StepCosts


class BlockedBy(StrEnum):
    SEATS = "seats"
    """All seats are taken by requests that do not have to give way."""
    BLOCKS = "blocks"
    """Its known tokens do not fit above the watermark."""
    TPOT = "tpot"
    """One more decoding request would break the tightest TPOT target."""
    GROUP = "group"
    """Static policy: the running group has not ended."""
    PREEMPTION = "preemption"
    """Something was preempted in this step, so nobody was let in."""
    TOKENS = "tokens"
    """The step's token budget, or the prefill its targets allow, is spent."""
    FORK = "fork"
    """Another request of its group is computing, or about to compute, the prompt for both."""


@dataclass(frozen=True, slots=True)
class BlockedHead:
    """The first waiting request that the last step could not admit, and why."""

    request_id: str
    reason: BlockedBy
    needed_blocks: int
    """New blocks it needs, headroom included; 0 where blocks are not the reason."""
    available_blocks: int
    waited_s: float
    """Since it was first found blocked."""
    num_bypassed: int


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    num_running: int
    num_waiting: int
    """Preempted ones included."""
    num_preempted: int
    """Of the waiting, those that ran before."""
    num_leaving: int
    """Ended, but in a step that has not returned: they still hold blocks and seat."""
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    total_blocks: int
    waiting_tokens: int
    """Known tokens (prompt and resumed) of waiting requests; a prompt that several share counts once."""
    prefill_backlog_tokens: int
    """Known tokens that running requests have not computed yet."""
    num_preemptions: int
    """Since the start; so are the next five."""
    num_admissions: int
    num_forks: int
    """Admissions with the prompt's K/V of a running request."""
    num_steps: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    decode_cap: int | None
    """Decoding requests that the last step's tightest TPOT target allows; None: nothing limits it."""
    step_costs: StepCosts | None
    blocked: BlockedHead | None


@dataclass(frozen=True, slots=True)
class Credit:
    """What may still be fetched; both are 0 when the scheduler has enough."""

    requests: int
    tokens: int
    """Known tokens (prompt and resumed)."""


def compute_credit(
    *,
    free_requests: int,
    ready_tokens: int,
    backlog_tokens: int,
    waiting_tokens: int,
    kv_tokens: int,
    is_idle: bool,
) -> Credit:
    """Room by requests, by prefill time and by KV, whichever is least.

    free_requests: requests that seats and the read-ahead can take. ready_tokens: prefill of one horizon.
    kv_tokens: tokens that the pool can take. An idle scheduler always takes one request, however large.
    """
    tokens = max(0, min(ready_tokens - backlog_tokens - waiting_tokens, kv_tokens - waiting_tokens))
    requests = max(0, free_requests) if tokens else 0
    if is_idle:
        requests = max(1, requests)
    return Credit(requests=requests, tokens=tokens if requests else 0)
