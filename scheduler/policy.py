"""Who goes first, who has to go, and how a policy fills seats: pure functions and data."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler.config import Policy
from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class PolicyRules:
    """What tells one batching policy from another."""

    refill: bool
    """A seat that becomes free is filled while others still run."""
    admit_beyond_budget: bool
    """Seats are filled even if the step's token budget is spent (a group is formed at once)."""


POLICY_RULES = {
    Policy.CONTINUOUS: PolicyRules(refill=True, admit_beyond_budget=False),
    Policy.STATIC: PolicyRules(refill=False, admit_beyond_budget=True),
}


def choose_victim(running: Sequence[Request]) -> Request:
    """The least urgent running request: lowest class, then latest."""
    return max(running, key=lambda request: request.urgency)


def choose_victims(
    candidate: Request,
    running: Sequence[Request],
    max_preemptions: int,
    is_enough: Callable[[Sequence[Request]], bool],
) -> list[Request]:
    """Fewest of the least urgent lower-class requests whose leaving lets `candidate` in; empty: impossible.

    `is_enough` must be monotone: what some victims make possible, more victims do not undo.
    """
    lower = [
        request
        for request in running
        if request.rank > candidate.rank and request.num_priority_preemptions < max_preemptions
    ]
    if not lower or not is_enough(lower):
        return []
    lower.sort(key=lambda request: request.urgency, reverse=True)
    count = bisect_left(range(1, len(lower)), True, key=lambda count: is_enough(lower[:count])) + 1
    return lower[:count]


def headroom_blocks(watermark: int, num_running: int, num_preemptions: int, growth_blocks: int) -> int:
    """Blocks to leave free when a request is admitted that was preempted `num_preemptions` times.

    The first time the pool is overcommitted, which is what fills it. A request that was thrown out comes
    back when half of `growth_blocks` fits (what it and the running ones may still grow by), and one thrown
    out twice when all of it does: then nobody has to go again, so a request cannot be recomputed for ever.
    Nothing running: no reserve at all, or a request as large as the pool would never start.
    """
    if num_running == 0:
        return 0
    return max(watermark, min(num_preemptions, 2) * growth_blocks // 2)
