"""Choice of preemption victims, block reserve and rules of each batching policy: pure functions and data."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler.request import Request
from scheduler.scheduler_config import Policy


@dataclass(frozen=True, slots=True)
class PolicyRules:
    """The differences between the batching policies."""

    refill: bool
    """Free slots are filled while other requests still run."""
    admit_beyond_budget: bool
    """Slots are filled even when the step's token budget is spent, so that a group forms at once."""


POLICY_RULES = {
    Policy.CONTINUOUS: PolicyRules(refill=True, admit_beyond_budget=False),
    Policy.STATIC: PolicyRules(refill=False, admit_beyond_budget=True),
}


def choose_victim(running: Sequence[Request]) -> Request:
    """Return the least urgent running request: lowest class, then latest due time."""
    return max(running, key=lambda request: request.urgency)


def choose_victims(
    candidate: Request,
    running: Sequence[Request],
    max_preemptions: int,
    is_enough: Callable[[Sequence[Request]], bool],
) -> list[Request]:
    """Return the fewest, least urgent requests of lower classes whose preemption admits `candidate`; empty: none do.

    `is_enough` must be monotone: if some victims are enough, more of them are enough too.
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
    """Return the blocks to leave free when a request that was preempted `num_preemptions` times is admitted.

    A first admission overcommits the pool, which is what fills it. After one preemption, half of `growth_blocks` (the
    growth that is left to the request and the running ones) must fit; after two, all of it must. Then no further
    preemption is needed, so a request is not recomputed forever. With nothing running there is no reserve, since
    otherwise a request as large as the pool would never start.
    """
    if num_running == 0:
        return 0
    return max(watermark, min(num_preemptions, 2) * growth_blocks // 2)
