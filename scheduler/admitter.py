"""Admits requests in queue order, past a bounded number of blocked ones, with preemption by class."""

from typing import NamedTuple

from scheduler.admission import NO_NEED, AdmissionView, BlockNeed, block_need, is_infeasible, reserve_blocks
from scheduler.goodput import ChunkBudget
from scheduler.policy import POLICY_RULES
from scheduler.request import Grant, Request, RequestStatus
from scheduler.scheduler_config import InfeasiblePolicy
from scheduler.spec import NUM_CLASSES, FinishReason
from scheduler.state import State
from scheduler.stats import BlockedBy, BlockedHead
from scheduler.step_time import StepCosts


class _Blocked(NamedTuple):
    request: Request
    reason: BlockedBy
    needed_blocks: int
    available_blocks: int


class Admitter:
    """Moves requests from waiting to running, and records why the first of the others is blocked."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._config = state.config
        self._rules = POLICY_RULES[state.config.policy]
        self._blocked: _Blocked | None = None
        self._joining: set[Request] = set()
        """Static policy: waiting requests that belong to the running group, with a slot reserved for each. They start
        when the running sibling has computed their prompt."""
        self._now_s = 0.0

    def run(
        self, chunks: ChunkBudget, costs: StepCosts | None, now_s: float, *, has_preempted: bool
    ) -> list[Grant]:
        """Admit the requests that pass every gate and grant each its first prefill chunk.

        has_preempted: this step has preempted or held back a request already, so nothing is admitted.
        """
        self._now_s = now_s
        self._blocked = None
        waiting = self._state.waiting
        closed = self._closed_by(has_preempted=has_preempted)
        if closed is None or (closed is BlockedBy.GROUP and self._joining):
            num_looked_at = self._config.max_num_seqs + self._config.max_blocked_scan + waiting.num_sharing
            candidates = waiting.peek(num_looked_at) if closed is None else self._joiners()
            grants = self._admit(candidates, chunks, costs)
        else:
            grants = []
        if closed is not None and self._blocked is None:
            for head in waiting.peek(1):
                self._note(head, closed)
        return grants

    def blocked_head(self, now_s: float) -> BlockedHead | None:
        """Return the first request that the last step could not admit; None: there is none, or it has ended since."""
        block = self._blocked
        if block is None or block.request.status > RequestStatus.PREEMPTED:
            return None
        since_s = block.request.blocked_since_s
        return BlockedHead(
            request_id=block.request.spec.request_id,
            reason=block.reason,
            needed_blocks=block.needed_blocks,
            available_blocks=block.available_blocks,
            waited_s=0.0 if since_s is None else now_s - since_s,
            num_bypassed=block.request.num_bypassed,
        )

    def _closed_by(self, *, has_preempted: bool) -> BlockedBy | None:
        self._joining = {request for request in self._joining if request.status <= RequestStatus.PREEMPTED}
        if has_preempted:
            return BlockedBy.PREEMPTION
        if (self._state.running or self._state.num_leaving) and not self._rules.refill:
            return BlockedBy.GROUP
        self._joining.clear()
        return None

    def _joiners(self) -> list[Request]:
        return sorted(self._joining, key=lambda request: (request.due_s, request.order))

    def _admit(self, candidates: list[Request], chunks: ChunkBudget, costs: StepCosts | None) -> list[Grant]:
        state, config = self._state, self._config
        view = AdmissionView(config, state.pool, state.running, costs)
        grants: list[Grant] = []
        passed: list[Request] = []
        barred_rank = NUM_CLASSES
        for request in candidates:
            if self._drop_infeasible(request, costs) or request.rank >= barred_rank:
                continue
            reason, need, victims = self._judge(request, view)
            if reason is BlockedBy.FORK:
                self._await_sibling(request)
                continue
            if reason is not None and not victims:
                self._note(request, reason, need)
                passed.append(request)
                if request.num_bypassed >= config.max_bypasses or len(passed) > config.max_blocked_scan:
                    break
                continue
            num_computed = need.num_computed_tokens
            size = chunks.fit(num_computed, request.num_tokens - num_computed)
            if size == 0 and not self._rules.admit_beyond_budget:
                self._note(request, BlockedBy.TOKENS)
                break
            if state.hold_back(victims):
                # They are preempted once their step returns; until then nothing is admitted.
                self._note(request, reason or BlockedBy.PREEMPTION, need)
                break
            for victim in victims:
                barred_rank = min(barred_rank, victim.rank)
                victim.num_priority_preemptions += 1
                state.preempt(victim)
            for earlier in passed:
                earlier.num_bypassed += 1
            state.admit(request, need)
            self._joining.discard(request)
            view.entered(request, has_preempted=bool(victims))
            chunks.take(num_computed, size)
            grants.append(Grant(request, size))
            if any(earlier.num_bypassed >= config.max_bypasses for earlier in passed):
                break
        return grants

    def _judge(
        self, request: Request, view: AdmissionView
    ) -> tuple[BlockedBy | None, BlockNeed, list[Request]]:
        """Return the closed gate if any, the blocks needed, and the requests to preempt to open the gate."""
        forks = self._state.forks
        lender = forks.lender(request)
        if lender is None and forks.must_wait(request):
            return BlockedBy.FORK, NO_NEED, []
        num_kept_slots = len(self._joining) - (request in self._joining)
        num_free_slots = self._state.slots.num_free - num_kept_slots
        if num_free_slots == 0 and not view.outranks_any(request):
            return BlockedBy.SLOTS, NO_NEED, []
        need = block_need(request, self._state.pool, self._config, lender)
        reason = view.blocked_by(request, need, num_free_slots)
        return reason, need, [] if reason is None else view.victims_for(request, need, num_free_slots)

    def _await_sibling(self, request: Request) -> None:
        """Let a request wait for its sibling to compute the prompt; it neither blocks others nor counts as bypassed."""
        self._note(request, BlockedBy.FORK)
        if not self._rules.refill and len(self._joining) < self._state.slots.num_free:
            self._joining.add(request)

    def _drop_infeasible(self, request: Request, costs: StepCosts | None) -> bool:
        """End or relegate a request that would miss its deadline even if it started now; return whether it was."""
        num_missing = request.num_tokens
        if self._state.forks.is_started(request):
            num_missing -= min(len(request.spec.prompt_token_ids), request.num_tokens - 1)
        if request.relegated or not is_infeasible(
            request, num_missing, costs, self._state.running, self._now_s, self._config
        ):
            return False
        if self._config.infeasible_policy is InfeasiblePolicy.EXPIRE:
            self._state.end(request, FinishReason.EXPIRED)
        else:
            self._state.relegate(request)
        return True

    def _note(self, request: Request, reason: BlockedBy, need: BlockNeed | None = None) -> None:
        """Record that a request is blocked; the first one of the step is reported."""
        if request.blocked_since_s is None:
            request.blocked_since_s = self._now_s
        if self._blocked is None:
            needed = 0
            if need is not None and reason is BlockedBy.BLOCKS:
                needed = need.num_taken + reserve_blocks(request, self._state.running, self._config)
            self._blocked = _Blocked(request, reason, needed, self._state.pool.num_available)
