"""Simulation: the real Scheduler on a virtual clock, driven by given arrivals and output lengths."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.plan import RowResult, SamplingParams, StepPlan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import Policy, SchedulerConfig
from scheduler.spec import FinishReason, Rejection, RequestSpec, RequestUpdate, ServiceClass
from scheduler.step_time import StepCosts, StepLoad

UNIT_COSTS = StepCosts(base_s=1.0, prefill_token_s=0.0, decode_s=0.0, context_token_s=0.0)
"""Every step takes one second, so that time counts iterations."""
_STOP_TOKEN_ID = 1


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """A request whose output length only the simulated model knows; the scheduler sees max_tokens."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int | None = None
    """None: equal to num_output_tokens, so that the request ends by length."""
    arrival_s: float = 0.0
    service_class: ServiceClass = ServiceClass.STANDARD
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    tenant: str = ""
    num_shared_tokens: int = 0
    """Leading prompt tokens that all requests of the tenant share."""

    def spec(self, number: int) -> RequestSpec:
        """Build the request; prompt tokens after the shared ones are unique to `number`."""
        own = range(self.num_shared_tokens, self.num_prompt_tokens)
        prompt = [2 + position for position in range(min(self.num_shared_tokens, self.num_prompt_tokens))]
        prompt += [(number + 1) * 1_000_000 + position for position in own]
        return RequestSpec(
            request_id=self.request_id,
            prompt_token_ids=tuple(prompt),
            max_tokens=self.max_tokens or self.num_output_tokens,
            sampling=SamplingParams(seed=number, temperature=0.0),
            arrival_s=self.arrival_s,
            stop_token_ids=frozenset((_STOP_TOKEN_ID,)),
            service_class=self.service_class,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            deadline_s=self.deadline_s,
            tenant=self.tenant,
        )


@dataclass(frozen=True, slots=True)
class Iteration:
    """One step and the request in each slot."""

    start_s: float
    step_time_s: float
    num_tokens: int
    slots: tuple[str | None, ...]
    """Id of the request that computed in each slot; None: the slot was idle."""


@dataclass(slots=True)
class Outcome:
    """What happened to one request; times are virtual seconds."""

    arrival_s: float
    token_times_s: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    finish_s: float | None = None
    num_cached_tokens: int = 0
    rejection: Rejection | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """The result of a simulation."""

    iterations: tuple[Iteration, ...]
    outcomes: dict[str, Outcome]
    num_slots: int
    num_preemptions: int

    @property
    def slot_use(self) -> float:
        """Fraction of slots that computed, over all iterations."""
        busy = sum(name is not None for iteration in self.iterations for name in iteration.slots)
        return busy / (self.num_slots * len(self.iterations)) if self.iterations else 0.0

    @property
    def total_s(self) -> float:
        if not self.iterations:
            return 0.0
        return self.iterations[-1].start_s + self.iterations[-1].step_time_s


def run_virtual(
    config: SchedulerConfig, requests: Iterable[VirtualRequest], costs: StepCosts = UNIT_COSTS
) -> VirtualRun:
    """Run `requests` through the scheduler, with step times from `costs`. The result is deterministic."""
    clock = _Clock(config, list(requests), costs)
    while clock.step():
        pass
    return VirtualRun(
        tuple(clock.iterations),
        clock.outcomes,
        config.max_num_seqs,
        clock.scheduler.stats().num_preemptions,
    )


def run_lengths(
    output_lengths: Sequence[int], num_slots: int, policy: Policy, num_prompt_tokens: int = 1
) -> VirtualRun:
    """Run requests r0, r1, … with these output lengths, all present at the start, on `num_slots` slots.

    The iteration that computes a prompt yields its first token, so a request of n tokens takes n iterations. Raises
    ValueError if output_lengths is empty.
    """
    if not output_lengths:
        raise ValueError("output_lengths has 0 entries: at least 1 is needed")
    block_size = 16
    longest = num_prompt_tokens + max(output_lengths)
    config = SchedulerConfig(
        num_blocks=(num_slots + 1) * (longest // block_size + 2),
        block_size=block_size,
        max_num_seqs=num_slots,
        max_model_len=longest,
        max_num_batched_tokens=num_slots * max(1, num_prompt_tokens),
        max_waiting=len(output_lengths),
        policy=policy,
        prefix_caching=True,
        targets={},
        enable_goodput=False,
    )
    requests = [
        VirtualRequest(f"r{number}", num_prompt_tokens, length)
        for number, length in enumerate(output_lengths)
    ]
    return run_virtual(config, requests)


class _Clock:
    """Adds the requests that have arrived, runs a step and advances the time by its duration.

    With look-ahead, the next step is planned when the current one begins.
    """

    def __init__(self, config: SchedulerConfig, requests: list[VirtualRequest], costs: StepCosts) -> None:
        self.scheduler = Scheduler(config)
        self.iterations: list[Iteration] = []
        self.outcomes = {request.request_id: Outcome(request.arrival_s) for request in requests}
        self._costs = costs
        self._now_s = 0.0
        self._in_flight: deque[StepPlan] = deque()
        self._arrivals = deque(sorted(enumerate(requests), key=lambda pair: pair[1].arrival_s))
        self._stops = {
            request.request_id: request.num_output_tokens for request in requests if request.max_tokens
        }

    def step(self) -> bool:
        """Run one step or advance to the next arrival; False: all requests have ended."""
        self._add_arrived()
        self._plan_ahead()
        if not self._in_flight:
            self._take_updates()
            if not self._arrivals:
                return False
            self._now_s = max(self._now_s, self._arrivals[0][1].arrival_s)
            return True
        plan = self._in_flight.popleft()
        start_s = self._now_s
        step_time_s = self._costs.predict(_load_of(plan))
        self._now_s += step_time_s
        rows = tuple(self._result_of(row.request_id, row.num_generated_tokens) for row in plan.rows)
        self.scheduler.update(StepResult(plan.step_id, rows, step_time_s), self._now_s)
        self._take_updates()
        slots: list[str | None] = [None] * self.scheduler.config.max_num_seqs
        for row in plan.rows:
            slots[row.slot] = row.request_id
        self.iterations.append(Iteration(start_s, step_time_s, plan.num_tokens, tuple(slots)))
        return True

    def _plan_ahead(self) -> None:
        while len(self._in_flight) <= self.scheduler.config.num_lookahead_steps:
            plan = self.scheduler.schedule(self._now_s)
            if plan is None:
                return
            self._in_flight.append(plan)

    def _add_arrived(self) -> None:
        while self._arrivals and self._arrivals[0][1].arrival_s <= self._now_s:
            number, request = self._arrivals.popleft()
            rejection = self.scheduler.add(request.spec(number), self._now_s)
            self.outcomes[request.request_id].rejection = rejection

    def _result_of(self, request_id: str, num_generated_tokens: int) -> RowResult:
        is_last = num_generated_tokens + 1 == self._stops.get(request_id)
        return RowResult(request_id, token_id=_STOP_TOKEN_ID if is_last else 2 + num_generated_tokens)

    def _take_updates(self) -> None:
        for update in self.scheduler.take_updates():
            self._record(self.outcomes[update.request_id], update)

    def _record(self, outcome: Outcome, update: RequestUpdate) -> None:
        outcome.token_times_s += [self._now_s] * len(update.new_token_ids)
        if update.finish is not None:
            outcome.finish = update.finish
            outcome.finish_s = self._now_s
            outcome.num_cached_tokens = update.num_cached_tokens


def _load_of(plan: StepPlan) -> StepLoad:
    sizes = [len(row.token_ids) for row in plan.rows]
    decodes = sum(size == 1 for size in sizes)
    context = sum(row.sample_position for row in plan.rows)
    return StepLoad(sum(sizes) - decodes, decodes, context)
