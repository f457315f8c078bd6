"""Divides the tokens of each step, the blocks and the slots among requests. No clock, no threads, no I/O."""

from collections import deque

from scheduler import goodput
from scheduler.admission import find_rejection, reject_duplicate, reject_full
from scheduler.admitter import Admitter
from scheduler.blocks import BlockPool
from scheduler.goodput import ChunkBudget
from scheduler.plan import RowResult, ScheduledRow, StepPlan, StepResult
from scheduler.policy import choose_victim
from scheduler.request import Grant, Request, RequestStatus, Step, build_step
from scheduler.scheduler_config import SchedulerConfig
from scheduler.spec import FinishReason, Rejection, RequestSpec, RequestUpdate
from scheduler.state import State
from scheduler.stats import Credit, SchedulerStats, compute_credit
from scheduler.step_time import StepCosts, StepLoad, StepTimeModel


class Scheduler:
    """Turns requests into step plans and step results into updates.

    Call `schedule`, run the plan, call `update` with its result, and repeat. With num_lookahead_steps = 1, one more
    `schedule` may precede `update`; results come in the order of the plans. `add` and `finish` may be called at any
    time. A request that ends while steps of it are in flight keeps its blocks and slot until they return. All times
    are seconds on the caller's monotonic clock. Methods raise AssertionError if they are called out of order.
    """

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel | None = None) -> None:
        self.config = config
        self.step_time = step_time or StepTimeModel()
        self._state = State(config)
        self._admitter = Admitter(self._state)
        self._in_flight: deque[Step] = deque()
        self._decode_cap: int | None = None
        self._num_orders = 0
        self._num_steps = 0
        self._now_s = 0.0
        self._returned_s = 0.0
        """When the last result arrived."""

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs: `schedule` will plan it, now or after a result in flight, or end it."""
        return bool(self._state.requests)

    @property
    def pool(self) -> BlockPool:
        """The block pool, read-only."""
        return self._state.pool

    def add(self, spec: RequestSpec, now_s: float) -> Rejection | None:
        """Accept a request, or return the limit that it exceeds. One that is already complete or late ends at once."""
        self._now_s = now_s
        state, config = self._state, self.config
        rejection = find_rejection(spec, config)
        if rejection is None and spec.request_id in state.requests:
            rejection = reject_duplicate(spec.request_id)
        if rejection is not None:
            return rejection
        request = Request.of(spec, self._num_orders, config)
        ended = request.finish_reason()
        if ended is None and spec.deadline_s is not None and spec.deadline_s <= now_s:
            ended = FinishReason.EXPIRED
        if ended is None and len(state.waiting) >= config.max_waiting:
            return reject_full(len(state.waiting), config.max_waiting)
        self._num_orders += 1
        state.enqueue(request)
        if ended is not None:
            state.end(request, ended)
        return None

    def schedule(self, now_s: float) -> StepPlan | None:
        """Plan the next step; None: nothing can run, at least not before the next result."""
        num_in_flight, limit = len(self._in_flight), self.config.num_lookahead_steps
        assert num_in_flight <= limit, (
            f"schedule() before update(): {num_in_flight} plans are in flight, at most {limit} may be"
        )
        self._now_s = now_s
        state = self._state
        state.held_back.clear()
        for late in state.deadlines.pop_passed(now_s):
            state.end(late, FinishReason.EXPIRED)
        costs = self.step_time.costs if self.config.enable_goodput else None
        num_preempted = state.num_preemptions
        decodes, limit_s = self._pick_decodes(costs)
        self._grow(decodes)
        grants = [Grant(request, 1) for request in decodes if state.takes_part(request)]
        chunks = self._chunk_budget(grants, costs, limit_s)
        grants += self._continue_prefills(chunks)
        has_preempted = state.num_preemptions > num_preempted or bool(state.held_back)
        grants += self._admitter.run(chunks, costs, now_s, has_preempted=has_preempted)
        return self._hand_out(grants, costs)

    def update(self, result: StepResult, now_s: float) -> None:
        """Apply the result of the oldest step in flight: append tokens, end requests, release what they held."""
        assert self._in_flight, f"update() with step {result.step_id}, but no plan is in flight"
        step = self._in_flight[0]
        planned = step.plan
        assert result.step_id == planned.step_id, f"step {result.step_id} returned, not {planned.step_id}"
        ids = [row.request_id for row in planned.rows]
        assert [row.request_id for row in result.rows] == ids, "rows of the result are not those of the plan"
        self._in_flight.popleft()
        self._state.forks.copied(planned.block_copies)
        self._now_s = self._returned_s = now_s
        self.step_time.observe(step.load, result.step_time_s)
        for request, plan_row, row in zip(step.requests, planned.rows, result.rows, strict=True):
            request.num_in_flight -= 1
            request.num_pending_tokens -= plan_row.sampling is not None
            request.num_settled_tokens = plan_row.sample_position
            if request.status is RequestStatus.FINISHED:
                self._take_late_row(request, plan_row, row)
            else:
                self._take_row(request, plan_row, row)
        self._state.forks.settled()

    def finish(self, request_id: str, reason: FinishReason, now_s: float, error: str | None = None) -> bool:
        """End a waiting or running request; False: there is no such request (any more)."""
        self._now_s = now_s
        request = self._state.requests.get(request_id)
        if request is None:
            return False
        self._state.end(request, reason, error)
        return True

    def take_updates(self) -> list[RequestUpdate]:
        """Return what happened since the last call, one update per request."""
        return self._state.updates.take()

    def credit(self) -> Credit:
        """Return how much more may be fetched: what slots, pool and measured prefill rate can serve soon."""
        config, state, costs = self.config, self._state, self.step_time.costs
        num_steps = 4.0
        if costs is not None:
            load = StepLoad(config.max_num_batched_tokens, len(state.running), 0)
            num_steps = max(1.0, config.credit_horizon_s / max(costs.predict(load), 1e-6))
        num_waiting = len(state.waiting)
        ahead = state.slots.num_free + config.max_num_seqs - num_waiting
        return compute_credit(
            free_requests=min(config.max_waiting - num_waiting, ahead),
            ready_tokens=int(num_steps * config.max_num_batched_tokens),
            backlog_tokens=state.prefill_backlog_tokens,
            waiting_tokens=state.waiting_tokens,
            kv_tokens=state.pool.num_available * config.block_size + config.pool_tokens // 4,
            is_idle=not state.requests,
        )

    def stats(self) -> SchedulerStats:
        """Return a snapshot for metrics and readiness."""
        state = self._state
        return SchedulerStats(
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_preempted=state.waiting.num_preempted,
            num_leaving=state.num_leaving,
            free_blocks=state.pool.num_free,
            cached_blocks=state.pool.num_cached,
            held_blocks=state.pool.num_held,
            total_blocks=state.pool.num_blocks,
            waiting_tokens=state.waiting_tokens,
            prefill_backlog_tokens=state.prefill_backlog_tokens,
            num_preemptions=state.num_preemptions,
            num_admissions=state.num_admissions,
            num_forks=state.num_forks,
            num_steps=self._num_steps,
            prefix_queried_tokens=state.num_queried_tokens,
            prefix_hit_tokens=state.num_hit_tokens,
            decode_cap=self._decode_cap,
            step_costs=self.step_time.costs,
            blocked=self._admitter.blocked_head(self._now_s),
        )

    def _pick_decodes(self, costs: StepCosts | None) -> tuple[list[Request], float | None]:
        """Return the requests that decode in this step and the step time that their tightest target allows."""
        running = self._state.running
        decodes = [request for request in running if request.can_decode]
        limit_s = None if costs is None else goodput.tightest_tpot_s(costs, decodes)
        self._decode_cap = None
        if costs is None or limit_s is None:
            return decodes, None
        mean_context = sum(request.num_tokens for request in decodes) / len(decodes)
        self._decode_cap = goodput.decode_cap(costs, limit_s, mean_context)
        start_s, max_skipped = self._next_start_s(), self.config.max_skipped_steps
        chosen = goodput.choose_decodes(costs, decodes, limit_s, start_s, max_skipped)
        if len(chosen) < len(decodes):
            for request in decodes:
                request.num_skipped_steps += 1
            for request in chosen:
                request.num_skipped_steps = 0
        return chosen, limit_s

    def _next_start_s(self) -> float:
        """Return when the step planned now is expected to begin: at the predicted end of the step in flight."""
        if not self._in_flight:
            return self._now_s
        step = self._in_flight[-1]
        start_s = max(step.planned_s, self._returned_s)
        return max(self._now_s, start_s + (step.plan.predicted_s or 0.0))

    def _grow(self, decodes: list[Request]) -> None:
        """Allocate room for the next token of each decoding request; preempt the least urgent one if no block is free.

        If a step of that one is in flight, both skip this step: its blocks are not free before the step returns.
        """
        state, block_size = self._state, self.config.block_size
        for request in decodes:
            if request.num_tokens + request.num_pending_tokens <= len(request.block_table) * block_size:
                continue
            while state.takes_part(request) and not state.pool.num_available:
                victim = choose_victim(state.running)
                if state.hold_back((victim,)):
                    state.held_back.add(request)
                else:
                    state.preempt(victim)
            if state.takes_part(request):
                request.block_table += state.pool.allocate(1)

    def _chunk_budget(
        self, decodes: list[Grant], costs: StepCosts | None, limit_s: float | None
    ) -> ChunkBudget:
        room_s = None
        if costs is not None and limit_s is not None:
            context = sum(grant.request.num_tokens for grant in decodes)
            room_s = limit_s - costs.predict(StepLoad(0, len(decodes), context))
        left = self.config.max_num_batched_tokens - len(decodes)
        return ChunkBudget(left, costs, room_s, self.config.min_prefill_tokens)

    def _continue_prefills(self, chunks: ChunkBudget) -> list[Grant]:
        running = self._state.running
        prefills = [request for request in running if request.num_tokens - request.num_computed_tokens > 1]
        prefills.sort(key=lambda request: request.urgency)
        grants: list[Grant] = []
        for request in prefills:
            size = chunks.fit(request.num_computed_tokens, request.num_missing_tokens)
            if size:
                chunks.take(request.num_computed_tokens, size)
                grants.append(Grant(request, size))
        return grants

    def _hand_out(self, grants: list[Grant], costs: StepCosts | None) -> StepPlan | None:
        """Build the plan from the grants, without requests preempted by admission or granted no tokens yet."""
        rows = [grant for grant in grants if grant.num_tokens and self._state.takes_part(grant.request)]
        if not rows:
            return None
        released = self._state.slots.take_released()
        copies = self._state.forks.take_copies()
        block_size = self.config.block_size
        step = build_step(self._num_steps, rows, block_size, released, copies, costs, self._now_s)
        self._num_steps += 1
        self._in_flight.append(step)
        return step.plan

    def _take_late_row(self, request: Request, planned: ScheduledRow, row: RowResult) -> None:
        """Process a row whose request has ended since the row was planned."""
        # A pending row of a request that ended well follows its last token, so its failure means nothing.
        matters = not (request.ended_well and planned.is_pending)
        if row.error is not None and matters:
            self._state.invalidate(request)
        if request.num_in_flight == 0:
            self._state.leave(request)

    def _take_row(self, request: Request, planned: ScheduledRow, row: RowResult) -> None:
        """Process a row of a live request: append its token, end the request if it is complete."""
        state, samples = self._state, planned.sampling is not None
        if row.error is not None or (samples and row.token_id is None):
            state.fail(request, row.error or "the step returned no token for this row")
            return
        state.publish(request)
        if row.token_id is None or not samples:
            return
        request.generated.append(row.token_id)
        request.num_tokens += 1
        request.last_token_s = self._now_s
        state.updates.token(request, row.token_id, row.logprobs)
        ended = request.finish_reason()
        if ended is not None:
            state.end(request, ended)
