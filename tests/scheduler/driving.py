"""Drives the real Scheduler with a model that has a paged memory: wrong bookkeeping shows as wrong tokens."""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from scheduler.plan import (
    PENDING_TOKEN,
    RowResult,
    SamplingParams,
    ScheduledRow,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import SchedulerConfig
from scheduler.spec import FinishReason, RequestSpec, RequestUpdate
from scheduler.step_time import StepCosts, StepLoad, StepTimeModel
from tests.support.configs import scheduler_config

STOP = 1
COSTS = StepCosts(base_s=0.010, prefill_token_s=0.001, decode_s=0.002, context_token_s=0.000_001)


def make_config(**changes: Any) -> SchedulerConfig:
    base = scheduler_config(
        num_blocks=64, block_size=4, max_num_seqs=4, max_model_len=256, max_num_batched_tokens=32
    )
    return replace(base, **changes)


def make_spec(
    request_id: str, prompt: int | Iterable[int] = 4, max_tokens: int = 4, **changes: Any
) -> RequestSpec:
    """A prompt given by its length is this request's own: it shares no prefix with others."""
    if isinstance(prompt, int):
        seed = sum((i + 1) * ord(char) for i, char in enumerate(request_id))
        prompt = range(1000 * seed, 1000 * seed + prompt)
    spec = RequestSpec(request_id, tuple(prompt), max_tokens, SamplingParams(seed=0), arrival_s=0.0)
    return replace(spec, **changes)


def next_content(content: int, token_id: int) -> int:
    return hash((content, token_id)) & 0xFFFF_FFFF


def sampled_token(content: int) -> int:
    return 2 + content % 1000


def undisturbed_output(prompt: Iterable[int], num_tokens: int) -> tuple[int, ...]:
    """What a request must produce whatever happens around it."""
    content = 0
    for token_id in prompt:
        content = next_content(content, token_id)
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(sampled_token(content))
        content = next_content(content, output[-1])
    return tuple(output)


def load_of(plan: StepPlan) -> StepLoad:
    sizes = [len(row.token_ids) for row in plan.rows]
    decodes = sum(size == 1 for size in sizes)
    return StepLoad(sum(sizes) - decodes, decodes, sum(row.sample_position for row in plan.rows))


class PagedModel:
    """Each slot of the pool keeps the hash of all tokens up to it, as K/V would."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self._kv: dict[int, int] = {}
        self._last_tokens: dict[int, int] = {}
        """By slot: what PENDING_TOKEN stands for."""
        self.stop_after: dict[str, int] = {}
        """Request id to the number of output tokens of which the last is STOP."""

    def run(
        self, plan: StepPlan, failing: Iterable[str] = (), step_time_s: float | None = None
    ) -> StepResult:
        for source, destination in plan.block_copies:
            self._copy(source, destination)
        known = [
            replace(row, token_ids=(self._last_tokens[row.slot],)) if row.is_pending else row
            for row in plan.rows
        ]
        rows = tuple(self._row(row, fails=row.request_id in failing) for row in known)
        for row, result in zip(known, rows, strict=True):
            if row.sampling is not None:
                self._last_tokens[row.slot] = result.token_id or 0
        duration_s = COSTS.predict(load_of(plan)) if step_time_s is None else step_time_s
        return StepResult(plan.step_id, rows, duration_s)

    def _row(self, row: ScheduledRow, *, fails: bool) -> RowResult:
        position = row.num_computed_tokens
        content = self._kv[self._kv_slot(row, position - 1)] if position else 0
        for token_id in row.token_ids:
            content = -1 if fails else next_content(content, token_id)
            self._kv[self._kv_slot(row, position)] = content
            position += 1
        if fails:
            return RowResult(row.request_id, error="logits are not finite")
        if row.sampling is None:
            return RowResult(row.request_id)
        is_last = self.stop_after.get(row.request_id) == row.num_generated_tokens + 1
        logprobs = None if row.sampling.num_logprobs is None else TokenLogprobs(-0.5, ())
        return RowResult(row.request_id, STOP if is_last else sampled_token(content), logprobs)

    def _copy(self, source: int, destination: int) -> None:
        for offset in range(self._block_size):
            content = self._kv.get(source * self._block_size + offset, -2)
            self._kv[destination * self._block_size + offset] = content

    def _kv_slot(self, row: ScheduledRow, position: int) -> int:
        return row.block_table[position // self._block_size] * self._block_size + position % self._block_size


class RaisingModel(PagedModel):
    """A failing row raises before it writes anything; a row that reads its slots finds what was there before."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._kv = defaultdict(lambda: -2)

    def _row(self, row: ScheduledRow, *, fails: bool) -> RowResult:
        if fails:
            return RowResult(row.request_id, error="RuntimeError in the model's step")
        return super()._row(row, fails=False)


class Driver:
    """Scheduler, model and clock; checks after every step what must hold after every step."""

    def __init__(self, config: SchedulerConfig | None = None, step_time: StepTimeModel | None = None) -> None:
        self.config = config or make_config()
        self.scheduler = Scheduler(self.config, step_time)
        self.model = PagedModel(self.config)
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan] = deque()
        """Planned and not complete: one, or two with look-ahead."""
        self.num_wasted = 0
        """Rows whose request had ended when they came back."""
        self.updates: list[RequestUpdate] = []
        self._outputs: defaultdict[str, list[int]] = defaultdict(list)
        self._ends: defaultdict[str, list[RequestUpdate]] = defaultdict(list)

    def add(self, *specs: RequestSpec) -> None:
        for spec in specs:
            rejection = self.scheduler.add(spec, self.now_s)
            assert rejection is None, rejection

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now_s)
        self.scheduler.pool.check()
        if plan is not None:
            check_plan(plan, self.config)
            check_pending(plan, self.in_flight)
            self.plans.append(plan)
            self.in_flight.append(plan)
        self.check_in_flight()
        return plan

    def plan_ahead(self) -> None:
        """As many plans as may be in flight, as the engine does it."""
        while len(self.in_flight) <= self.config.num_lookahead_steps and self.plan() is not None:
            pass

    def check_in_flight(self) -> None:
        """Whatever has happened since they were planned, no other request has what the steps in flight write."""
        writers: dict[int, tuple[str, int]] = {}
        for plan in self.in_flight:
            for row in plan.rows:
                blocks = row.block_table
                assert not self.scheduler.pool.num_unreferenced(blocks), "blocks still being written are free"
                for block in blocks[row.num_computed_tokens // self.config.block_size :]:
                    writer = (row.request_id, row.slot)
                    assert writers.setdefault(block, writer) == writer, (
                        "a block still being written has a new owner"
                    )

    def complete(self, plan: StepPlan, failing: Iterable[str] = (), step_time_s: float | None = None) -> None:
        assert plan is self.in_flight[0], "results come in the order of the plans"
        result = self.model.run(plan, failing, step_time_s)
        self.in_flight.popleft()
        self.num_wasted += sum(self.has_ended(row.request_id) for row in plan.rows)
        self.now_s += result.step_time_s
        self.scheduler.update(result, self.now_s)
        self.collect()
        self.scheduler.pool.check()
        self.check_in_flight()

    def step(self, failing: Iterable[str] = ()) -> StepPlan:
        self.plan_ahead()
        assert self.in_flight, "nothing to run"
        plan = self.in_flight[0]
        self.complete(plan, failing)
        return plan

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is left."""
        for _ in range(max_steps):
            self.plan_ahead()
            if not self.in_flight:
                self.collect()
                assert not self.scheduler.has_work, "work is left, but nothing is planned"
                return
            self.complete(self.in_flight[0])
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")

    def collect(self) -> None:
        for update in self.scheduler.take_updates():
            self.updates.append(update)
            self._outputs[update.request_id] += update.new_token_ids
            if update.finish is not None:
                self._ends[update.request_id].append(update)

    def forget_updates(self) -> None:
        """Before ids are used again."""
        self.updates.clear()
        self._outputs.clear()
        self._ends.clear()

    def output(self, request_id: str) -> tuple[int, ...]:
        return tuple(self._outputs[request_id])

    def end(self, request_id: str) -> RequestUpdate:
        """The one update that ends it."""
        [end] = self._ends[request_id]
        return end

    def finish_of(self, request_id: str) -> FinishReason | None:
        return self.end(request_id).finish

    def has_ended(self, request_id: str) -> bool:
        return bool(self._ends[request_id])

    def is_empty(self) -> bool:
        stats = self.scheduler.stats()
        return stats.held_blocks == stats.num_running == stats.num_waiting == stats.num_leaving == 0


def check_plan(plan: StepPlan, config: SchedulerConfig) -> None:
    """What each plan promises to the runner."""
    sizes = [len(row.token_ids) for row in plan.rows]
    assert plan.rows
    assert 1 <= plan.num_tokens <= config.max_num_batched_tokens
    assert sorted(sizes, key=lambda size: size > 1) == sizes, "rows of one token come first"
    assert min(sizes) >= 1
    slots = [row.slot for row in plan.rows]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < config.max_num_seqs for slot in slots)
    assert len({row.request_id for row in plan.rows}) == len(plan.rows)
    written: set[int] = set()
    for row in plan.rows:
        assert len(row.block_table) == -(-row.sample_position // config.block_size)
        assert len(set(row.block_table)) == len(row.block_table)
        first = row.num_computed_tokens // config.block_size
        own = row.block_table[first:]
        assert written.isdisjoint(own), "two requests write one block"
        written.update(own)
    sources, destinations = zip(*plan.block_copies, strict=True) if plan.block_copies else ((), ())
    assert len(set(destinations)) == len(destinations), "two copies onto one block"
    assert set(sources).isdisjoint(destinations), "copies whose order matters"
    for row in plan.rows:
        shared = row.block_table[: row.num_computed_tokens // config.block_size]
        assert written.isdisjoint(shared), "a request writes what another reads"


def check_pending(plan: StepPlan, in_flight: Iterable[StepPlan]) -> None:
    """A row whose token is not known follows one that samples it, in the step in flight."""
    sampling = {
        (row.request_id, row.slot) for other in in_flight for row in other.rows if row.sampling is not None
    }
    for row in plan.rows:
        assert row.is_pending == ((row.request_id, row.slot) in sampling)
        assert row.is_pending == (PENDING_TOKEN in row.token_ids)
        assert not (row.is_pending and row.history)


def ready_model(costs: StepCosts = COSTS) -> StepTimeModel:
    """A step-time model that has seen enough to be sure of `costs`."""
    model = StepTimeModel()
    for i in range(400):
        load = StepLoad((i * 37) % 256, (i * 7) % 33, (i * 911) % 8192)
        model.observe(load, costs.predict(load))
    return model
