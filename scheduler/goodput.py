"""How much work a step may hold and still meet its tightest TPOT target: functions of step costs and requests.

A target that even a step of that request alone would miss is ignored: the request misses it anyway, and a smaller
batch would only make the others miss theirs. All times are seconds.
"""

import math
from collections.abc import Iterable, Sequence

from scheduler.request import Request
from scheduler.step_time import StepCosts, StepLoad


def row_cost_s(costs: StepCosts, num_tokens: int) -> float:
    """Return the time that one decoding request with `num_tokens` known tokens adds to a step."""
    return costs.decode_s + costs.context_token_s * num_tokens


def achievable_tpot_s(costs: StepCosts, request: Request) -> float | None:
    """Return the request's TPOT target; None: it has none, or even a step of it alone would miss it."""
    target_s = request.tpot_s
    if target_s is None or costs.base_s + row_cost_s(costs, request.num_tokens) > target_s:
        return None
    return target_s


def tightest_tpot_s(costs: StepCosts, requests: Iterable[Request]) -> float | None:
    """Return the smallest achievable TPOT target of `requests`; None: there is none."""
    base_s, decode_s, context_token_s = costs.base_s, costs.decode_s, costs.context_token_s
    tightest_s = math.inf
    for request in requests:
        target_s = request.tpot_s
        if target_s is not None and target_s < tightest_s:
            alone_s = base_s + decode_s + context_token_s * request.num_tokens
            tightest_s = target_s if alone_s <= target_s else tightest_s
    return None if math.isinf(tightest_s) else tightest_s


def decode_cap(costs: StepCosts, limit_s: float, mean_context_tokens: float) -> int:
    """Return how many requests of mean context can decode within `limit_s`; at least 1."""
    row_s = costs.decode_s + costs.context_token_s * mean_context_tokens
    if row_s <= 0.0:
        return 1 << 30
    return max(1, math.floor((limit_s - costs.base_s) / row_s))


def may_wait(request: Request, start_s: float, limit_s: float, max_skipped_steps: int) -> bool:
    """Return whether a decoding request can skip the step that begins at start_s and be on time in the next one."""
    if request.num_skipped_steps >= max_skipped_steps:
        return False
    # A pending token arrives when the previous step ends, which is when this one begins.
    last_token_s = start_s if request.num_pending_tokens else request.last_token_s
    return request.tpot_s is None or start_s + 2.0 * limit_s <= last_token_s + request.tpot_s


def choose_decodes(
    costs: StepCosts, decodes: Sequence[Request], limit_s: float, start_s: float, max_skipped_steps: int
) -> list[Request]:
    """Return the requests that decode in the step that begins at start_s, in the given order.

    Requests that cannot wait always run, even past `limit_s`: skipping one would break its own target, and admission
    has kept their number within the limit. The others fill the time that is left, those that skipped the most steps
    first; none skips more than `max_skipped_steps` steps in a row.
    """
    context_tokens = sum(request.num_tokens for request in decodes)
    if costs.predict(StepLoad(0, len(decodes), context_tokens)) <= limit_s:
        return list(decodes)
    row_s = [row_cost_s(costs, request.num_tokens) for request in decodes]
    room_s = limit_s - costs.base_s
    waiting = [
        i for i, request in enumerate(decodes) if may_wait(request, start_s, limit_s, max_skipped_steps)
    ]
    chosen = set(range(len(decodes))).difference(waiting)
    room_s -= sum(row_s[i] for i in chosen)
    for i in sorted(waiting, key=lambda i: (-decodes[i].num_skipped_steps, decodes[i].last_token_s)):
        if row_s[i] <= room_s:
            room_s -= row_s[i]
            chosen.add(i)
    if not chosen:
        chosen.add(0)
    return [decodes[i] for i in sorted(chosen)]


class ChunkBudget:
    """Prefill tokens that still fit into the step being planned, by token budget and by time."""

    def __init__(
        self, num_tokens: int, costs: StepCosts | None, room_s: float | None, min_tokens: int
    ) -> None:
        """room_s: time left for prefill; None: no limit. min_tokens: granted even if they do not fit into room_s."""
        self._tokens_left = num_tokens
        self._costs = costs
        self._room_s = room_s
        self._floor_left = min_tokens

    def fit(self, num_computed_tokens: int, num_missing_tokens: int) -> int:
        """Return the largest chunk for a request with these counts; 0: none fits."""
        num_tokens = min(self._tokens_left, num_missing_tokens)
        if self._room_s is None or self._costs is None:
            return num_tokens
        token_s = self._costs.prefill_token_s + self._costs.context_token_s
        room_s = self._room_s - self._costs.context_token_s * num_computed_tokens
        in_time = num_tokens if token_s <= 0.0 else math.floor(max(0.0, room_s) / token_s)
        return min(num_tokens, max(in_time, self._floor_left))

    def take(self, num_computed_tokens: int, num_tokens: int) -> None:
        """Spend the budget on a chunk of `num_tokens` after `num_computed_tokens`."""
        self._tokens_left -= num_tokens
        self._floor_left = max(0, self._floor_left - num_tokens)
        if self._room_s is not None and self._costs is not None and num_tokens:
            self._room_s -= self._costs.prefill_token_s * num_tokens
            self._room_s -= self._costs.context_token_s * (num_computed_tokens + num_tokens)


def predicted_ttft_s(
    costs: StepCosts, num_tokens: int, chunk_tokens: int, num_decodes: int, context_tokens: int
) -> float:
    """Return the time to prefill `num_tokens` in chunks while `num_decodes` requests decode; a lower bound of TTFT."""
    num_steps = math.ceil(num_tokens / max(1, chunk_tokens))
    decode_step_s = costs.base_s + costs.decode_s * num_decodes + costs.context_token_s * context_tokens
    return num_steps * decode_step_s + (costs.prefill_token_s + costs.context_token_s) * num_tokens


class DecodeGate:
    """Decides whether one more request can decode beside the running ones within the tightest target.

    A request without a target is admitted only if all requests fit into one step, since it must not displace any.
    A request with a target may assume that the others skip as many steps as their own targets allow.
    """

    def __init__(self, costs: StepCosts | None, running: Iterable[Request], max_skipped_steps: int) -> None:
        self._costs = costs
        self._least_share = 1.0 / (1 + max_skipped_steps)
        self._rows: list[tuple[float, float]] = []
        """(time that the row adds to a step, its target) of each request."""
        self._all_s = 0.0
        self._limit_s = math.inf
        if costs is not None:
            for request in running:
                self.enter(request)

    def admits(self, request: Request) -> bool:
        """Return whether all targets still hold with `request` in the batch."""
        if self._costs is None:
            return True
        row_s, target_s = self._row_of(self._costs, request)
        limit_s = min(self._limit_s, target_s)
        room_s = limit_s - self._costs.base_s
        if self._all_s + row_s <= room_s:
            return True
        if math.isinf(target_s):
            return False
        rows = [*self._rows, (row_s, target_s)]
        return sum(cost * max(limit_s / target, self._least_share) for cost, target in rows) <= room_s

    def enter(self, request: Request) -> None:
        """Account for an admitted request."""
        if self._costs is None:
            return
        row_s, target_s = self._row_of(self._costs, request)
        self._rows.append((row_s, target_s))
        self._all_s += row_s
        self._limit_s = min(self._limit_s, target_s)

    @staticmethod
    def _row_of(costs: StepCosts, request: Request) -> tuple[float, float]:
        target_s = achievable_tpot_s(costs, request)
        return row_cost_s(costs, request.num_tokens), math.inf if target_s is None else target_s
