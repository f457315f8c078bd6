"""Statistics that the scheduler reports for metrics, readiness and the watchdog, and the credit for new fetches."""

from dataclasses import dataclass
from enum import StrEnum

from scheduler.step_time import StepCosts


class BlockedBy(StrEnum):
    """Why a waiting request was not admitted."""

    SLOTS = "slots"
    """All slots are taken by requests that it may not preempt."""
    BLOCKS = "blocks"
    """The blocks for its known tokens do not fit above the watermark."""
    TPOT = "tpot"
    """One more decoding request would break the tightest TPOT target."""
    GROUP = "group"
    """Static policy: the running group has not finished."""
    PREEMPTION = "preemption"
    """A request was preempted in this step, so none is admitted."""
    TOKENS = "tokens"
    """The step's token budget is spent, or the prefill that its targets allow."""
    FORK = "fork"
    """Another request of its fork group is computing, or is about to compute, their common prompt."""


@dataclass(frozen=True, slots=True)
class BlockedHead:
    """The first waiting request that the last step could not admit, and why."""

    request_id: str
    reason: BlockedBy
    needed_blocks: int
    """New blocks that it needs, headroom included; 0 when blocks are not the reason."""
    available_blocks: int
    waited_s: float
    """Seconds since the scheduler first found it blocked."""
    num_bypassed: int
    """Requests admitted past it."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """One snapshot. The counters from num_preemptions to prefix_hit_tokens count since the scheduler was created."""

    num_running: int
    num_waiting: int
    """Includes preempted requests."""
    num_preempted: int
    """Waiting requests that have been preempted."""
    num_leaving: int
    """Requests that have ended but are part of a step in flight: they still hold their blocks and slot."""
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    total_blocks: int
    waiting_tokens: int
    """Known tokens (prompt and generated) of waiting requests; a prompt that several requests share counts once."""
    prefill_backlog_tokens: int
    """Known tokens whose K/V running requests have not computed yet."""
    num_preemptions: int
    num_admissions: int
    num_forks: int
    """Admissions that took over the prompt's K/V from a running request."""
    num_steps: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    decode_cap: int | None
    """Decoding requests that the tightest TPOT target of the last step allows; None: no target limits them."""
    step_costs: StepCosts | None
    blocked: BlockedHead | None


@dataclass(frozen=True, slots=True)
class Credit:
    """How much more work may be fetched; both fields are 0 when the scheduler has enough."""

    requests: int
    tokens: int
    """Known tokens (prompt and generated)."""


def compute_credit(
    *,
    free_requests: int,
    ready_tokens: int,
    backlog_tokens: int,
    waiting_tokens: int,
    kv_tokens: int,
    is_idle: bool,
) -> Credit:
    """Return the smallest of three limits: the number of requests, prefill time and KV memory.

    free_requests: requests that fit into the slots and the read-ahead. ready_tokens: prefill tokens that one credit
    horizon can compute. kv_tokens: tokens that the pool can take. An idle scheduler always gets credit for one
    request, however large, so that it never starves.
    """
    tokens = max(0, min(ready_tokens - backlog_tokens - waiting_tokens, kv_tokens - waiting_tokens))
    requests = max(0, free_requests) if tokens else 0
    if is_idle:
        requests = max(1, requests)
    return Credit(requests=requests, tokens=tokens if requests else 0)
