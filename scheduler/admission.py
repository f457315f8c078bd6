"""Admission decisions without effects: which requests can never run, what an admission needs, what blocks it."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.blocks import BlockPool, num_blocks_for
from scheduler.goodput import DecodeGate, predicted_ttft_s
from scheduler.policy import choose_victims, headroom_blocks
from scheduler.request import Request
from scheduler.scheduler_config import SchedulerConfig
from scheduler.spec import Rejection, RequestSpec
from scheduler.stats import BlockedBy
from scheduler.step_time import StepCosts


def find_rejection(spec: RequestSpec, config: SchedulerConfig) -> Rejection | None:
    """Return the first limit that the request exceeds by itself, whatever else is running; None: it can run."""
    num_prompt = len(spec.prompt_token_ids)
    if num_prompt == 0:
        return _reject("prompt", 0, 1, "prompt has 0 tokens: at least 1 is needed")
    if spec.max_tokens < 1:
        return _reject(
            "max_tokens", spec.max_tokens, 1, f"max_tokens is {spec.max_tokens}: at least 1 is needed"
        )
    total = num_prompt + spec.max_tokens
    wanted = f"prompt ({num_prompt}) + max_tokens ({spec.max_tokens}) is {total} tokens"
    if total > config.max_model_len:
        limit = config.max_model_len
        return _reject("prompt + max_tokens", total, limit, f"{wanted}: the model length allows {limit}")
    if total > config.pool_tokens:
        limit = config.pool_tokens
        return _reject("prompt + max_tokens", total, limit, f"{wanted}: the KV pool holds {limit}")
    return None


def reject_duplicate(request_id: str) -> Rejection:
    message = f"request_id {request_id} is already waiting or running: the limit is 1 at a time"
    return _reject("request_id", request_id, 1, message)


def reject_full(num_waiting: int, limit: int) -> Rejection:
    return _reject("waiting", num_waiting, limit, f"{num_waiting} requests are waiting: the limit is {limit}")


def _reject(field: str, value: int | str, limit: int, message: str) -> Rejection:
    return Rejection(field=field, value=value, limit=limit, message=message)


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """Blocks that a request takes from the pool if it is admitted now."""

    shared: tuple[int, ...]
    """Full blocks of its cached prefix or of its lender."""
    num_computed_tokens: int
    """Tokens whose K/V is in the shared blocks and the copied one."""
    num_new: int
    """Blocks to allocate."""
    num_taken: int
    """Available blocks that it uses up: new ones, and cached ones that no other request holds."""
    lender: Request | None = None
    """Running request of the same fork group that has computed the prompt."""
    copied: int | None = None
    """The lender's block to copy onto the first new one, because the prompt ends inside it."""


NO_NEED = BlockNeed((), 0, 0, 0)


def block_need(
    request: Request, pool: BlockPool, config: SchedulerConfig, lender: Request | None = None
) -> BlockNeed:
    """Return the blocks for all known tokens of the request, taken from the cache or from `lender`, whichever has more.

    The last known token is always computed, since sampling needs its logits.
    """
    block_size = pool.block_size
    num_total = num_blocks_for(request.num_tokens, block_size)
    num_lent = 0 if lender is None else min(len(request.spec.prompt_token_ids), request.num_tokens - 1)
    hits: tuple[int, ...] = ()
    num_findable = (request.num_tokens - 1) // block_size
    if config.prefix_caching and num_findable * block_size > num_lent:
        hits = pool.match(request.hash_blocks(num_findable, block_size))
    if lender is None or len(hits) * block_size >= num_lent:
        num_new = num_total - len(hits)
        return BlockNeed(hits, len(hits) * block_size, num_new, num_new + pool.num_unreferenced(hits))
    num_full, num_copied = divmod(num_lent, block_size)
    return BlockNeed(
        shared=lender.block_table[:num_full],
        num_computed_tokens=num_lent,
        num_new=num_total - num_full,
        num_taken=num_total - num_full,
        lender=lender,
        copied=lender.block_table[num_full] if num_copied else None,
    )


def growth_blocks(request: Request, block_size: int) -> int:
    """Return how many blocks the request can still need beyond those for its known tokens."""
    last = len(request.spec.prompt_token_ids) + request.spec.max_tokens
    return num_blocks_for(last, block_size) - num_blocks_for(request.num_tokens, block_size)


def reserve_blocks(request: Request, running: Sequence[Request], config: SchedulerConfig) -> int:
    """Return how many blocks must stay available when `request` is admitted beside `running`."""
    growth = 0
    if request.num_preemptions:
        growth = sum(growth_blocks(other, config.block_size) for other in (request, *running))
    return headroom_blocks(config.headroom_blocks, len(running), request.num_preemptions, growth)


def is_infeasible(
    request: Request,
    num_missing_tokens: int,
    costs: StepCosts | None,
    running: Sequence[Request],
    now_s: float,
    config: SchedulerConfig,
) -> bool:
    """Return whether its first token is predicted to miss the deadline even if it is admitted now.

    num_missing_tokens: known tokens that the request has to compute itself.
    """
    deadline_s = request.spec.deadline_s
    if costs is None or deadline_s is None:
        return False
    backlog = sum(other.num_missing_tokens for other in running if other.num_missing_tokens > 1)
    context = sum(other.num_computed_tokens for other in running)
    ttft_s = predicted_ttft_s(
        costs, backlog + num_missing_tokens, config.max_num_batched_tokens, len(running), context
    )
    return now_s + ttft_s > deadline_s


class AdmissionView:
    """Live state for the admission decisions of one step; `victims` are treated as already preempted."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, running: Sequence[Request], costs: StepCosts | None
    ) -> None:
        self._config = config
        self._pool = pool
        self._running = running
        self._costs = costs
        self._gate: DecodeGate | None = None
        """Created on first use: most steps find no free slot."""
        self._lowest_rank = self._find_lowest_rank()

    def blocked_by(
        self, request: Request, need: BlockNeed, num_free_slots: int, victims: Sequence[Request] = ()
    ) -> BlockedBy | None:
        """Return the first gate that is closed to `request`; None: it can be admitted."""
        if num_free_slots + len(victims) < 1:
            return BlockedBy.SLOTS
        running, available = self._running, self._pool.num_available
        if victims:
            gone = set(victims)
            running = [other for other in self._running if other not in gone]
            available += self._pool.num_freed_by([victim.block_table for victim in victims], need.shared)
        if need.num_taken + reserve_blocks(request, running, self._config) > available:
            return BlockedBy.BLOCKS
        gate = self._gate_over(running) if victims else self._own_gate()
        return None if gate.admits(request) else BlockedBy.TPOT

    def victims_for(self, request: Request, need: BlockNeed, num_free_slots: int) -> list[Request]:
        """Return running requests of a lower class to preempt for `request`; empty: no preemption would admit it."""
        return choose_victims(
            request,
            self._running,
            self._config.max_priority_preemptions,
            lambda victims: self.blocked_by(request, need, num_free_slots, victims) is None,
        )

    def outranks_any(self, request: Request) -> bool:
        """Return whether a running request could be preempted for `request`."""
        return request.rank < self._lowest_rank

    def entered(self, request: Request, *, has_preempted: bool) -> None:
        """Account for `request`, which is running now; has_preempted: other requests were preempted for it."""
        if has_preempted:
            self._gate = None
            self._lowest_rank = self._find_lowest_rank()
            return
        if self._gate is not None:
            self._gate.enter(request)
        self._lowest_rank = max(self._lowest_rank, request.rank)

    def _own_gate(self) -> DecodeGate:
        if self._gate is None:
            self._gate = self._gate_over(self._running)
        return self._gate

    def _gate_over(self, running: Sequence[Request]) -> DecodeGate:
        return DecodeGate(self._costs, running, self._config.max_skipped_steps)

    def _find_lowest_rank(self) -> int:
        limit = self._config.max_priority_preemptions
        return max(
            (other.rank for other in self._running if other.num_priority_preemptions < limit), default=-1
        )
