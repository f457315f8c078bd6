"""Arrivals, steps, failures and cancellations in any order, and what must hold after each."""

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler.plan import SamplingParams, StepPlan
from scheduler.scheduler_config import Policy, SchedulerConfig
from scheduler.spec import FinishReason, RequestSpec, ServiceClass
from tests.scheduler.driving import STOP, Driver, make_spec, ready_model, undisturbed_output
from tests.support.configs import scheduler_config

QUICK = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
CONTROL = settings(
    QUICK,
    max_examples=1_000,
    phases=(Phase.generate,),
    report_multiple_bugs=False,
    print_blob=False,
    database=None,
)

MAX_ROUNDS = 5


def run_until_seen(machine: "type[SchedulerMachine]", limits: settings, wanted: set[Any]) -> None:
    """Run sequences from fixed seeds, at most MAX_ROUNDS times `limits`, until all that is wanted has happened.

    Hypothesis draws from the constants of whatever modules are loaded, so which cases one round meets depends on the
    other tests of the run.
    """
    machine.seen = Counter()
    for number in range(MAX_ROUNDS):
        seeded = seed(number)(type(machine.__name__, (machine,), {}))
        run_state_machine_as_test(seeded, settings=limits)
        unseen = wanted - {name for name, count in machine.seen.items() if count}
        if not unseen:
            return
    raise AssertionError(f"the sequences never got to {unseen}")


configs = st.builds(
    scheduler_config,
    num_blocks=st.integers(5, 16),
    block_size=st.sampled_from([2, 4]),
    max_num_seqs=st.integers(1, 5),
    max_model_len=st.just(64),
    max_num_batched_tokens=st.integers(5, 24),
    policy=st.sampled_from(list(Policy)),
    watermark_blocks=st.integers(0, 3),
    prefix_caching=st.booleans(),
    max_waiting=st.integers(2, 12),
    max_bypasses=st.integers(0, 3),
    max_blocked_scan=st.integers(0, 3),
    enable_goodput=st.booleans(),
    min_prefill_tokens=st.integers(1, 8),
    max_skipped_steps=st.integers(0, 3),
)


first_sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(6, 18)), min_size=2, max_size=4)
"""(prompt tokens, max_tokens) of the requests that every sequence begins with."""


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts repeat few patterns, so that prefixes meet; pools are small, so that requests are preempted.

    Every sequence begins with requests that soon outgrow the pool, so that one round meets every case many times.
    """

    num_lookahead_steps: ClassVar[int] = 0
    quick: ClassVar[settings] = QUICK
    driver: Driver
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, RequestSpec] = {}
        self.failed: set[str] = set()
        self.reported = 0

    @initialize(config=configs, is_measured=st.booleans(), sizes=first_sizes)
    def start(self, config: SchedulerConfig, is_measured: bool, sizes: list[tuple[int, int]]) -> None:
        config = replace(config, num_lookahead_steps=self.num_lookahead_steps)
        self.driver = Driver(config, ready_model() if is_measured else None)
        for num_prompt, max_tokens in sizes:
            self.add_spec(make_spec("", (0,) * num_prompt, max_tokens), stop_after=0)

    @rule(
        stem=st.integers(0, 2),
        num_prompt=st.integers(0, 20),
        max_tokens=st.integers(0, 30),
        tenant=st.sampled_from(["", "a"]),
        service_class=st.sampled_from(list(ServiceClass)),
        tpot_s=st.sampled_from([None, 0.001, 0.02, 0.05]),
        deadline_after_s=st.sampled_from([None, None, None, 0.05, 5.0]),
        stop_after=st.integers(1, 20),
        num_resumed=st.sampled_from([0, 0, 0, 1, 5]),
        num_logprobs=st.sampled_from([None, 0]),
    )
    def add(
        self,
        stem: int,
        num_prompt: int,
        max_tokens: int,
        tenant: str,
        service_class: ServiceClass,
        tpot_s: float | None,
        deadline_after_s: float | None,
        stop_after: int,
        num_resumed: int,
        num_logprobs: int | None,
    ) -> None:
        now_s = self.driver.now_s
        prompt = tuple((i // (stem + 1)) % 2 for i in range(num_prompt))
        spec = RequestSpec(
            request_id="",
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(seed=0, repetition_penalty=1.0 + stem, num_logprobs=num_logprobs),
            arrival_s=now_s,
            stop_token_ids=frozenset((STOP,)),
            generated_token_ids=undisturbed_output(prompt, num_resumed),
            service_class=service_class,
            tpot_s=tpot_s,
            deadline_s=None if deadline_after_s is None else now_s + deadline_after_s,
            tenant=tenant,
        )
        self.add_spec(spec, stop_after)

    def add_spec(self, spec: RequestSpec, stop_after: int) -> None:
        """Add a request under the next free id; it samples STOP as token number `stop_after`, 0: never."""
        spec = replace(spec, request_id=f"r{len(self.specs)}")
        if self.driver.scheduler.add(spec, self.driver.now_s) is None:
            self.specs[spec.request_id] = spec
            self.driver.model.stop_after[spec.request_id] = stop_after
        self.driver.collect()

    @property
    def may_plan(self) -> bool:
        return len(self.driver.in_flight) <= self.driver.config.num_lookahead_steps

    @precondition(lambda self: self.may_plan)
    @rule()
    def schedule(self) -> None:
        has_work = self.driver.scheduler.has_work
        plan = self.driver.plan()
        self.driver.collect()
        if plan is not None:
            self.rows_are_wanted(plan)
        elif has_work and not self.driver.in_flight:
            assert not self.driver.scheduler.has_work, "work is left, but nothing is planned"

    @precondition(lambda self: bool(self.driver.in_flight))
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        plan = self.driver.in_flight[0]
        ids = [row.request_id for row in plan.rows]
        failing = {data.draw(st.sampled_from(ids))} if data.draw(st.booleans()) else set()
        self.failed |= failing
        self.driver.complete(plan, failing)

    def rows_are_wanted(self, plan: StepPlan) -> None:
        for row in plan.rows:
            assert row.num_generated_tokens < self.specs[row.request_id].max_tokens, "past max_tokens"

    @precondition(lambda self: bool(self.specs))
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.STOP]))
    def finish(self, data: st.DataObject, reason: FinishReason) -> None:
        name = data.draw(st.sampled_from(sorted(self.specs)))
        was_live = not self.driver.has_ended(name)
        assert self.driver.scheduler.finish(name, reason, self.driver.now_s) == was_live
        self.driver.collect()

    @rule()
    def run_some(self) -> None:
        for _ in range(9):
            if self.driver.in_flight and not self.may_plan:
                self.driver.complete(self.driver.in_flight[0])
            plan = self.driver.plan()
            if plan is not None:
                self.rows_are_wanted(plan)
        self.driver.collect()

    @invariant()
    def books_balance(self) -> None:
        self.driver.scheduler.pool.check()
        self.driver.check_in_flight()
        stats = self.driver.scheduler.stats()
        assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == stats.total_blocks
        assert stats.num_running + stats.num_leaving <= self.driver.config.max_num_seqs
        assert stats.num_waiting + stats.num_running == sum(
            not self.driver.has_ended(name) for name in self.specs
        )

    @invariant()
    def reports_are_right(self) -> None:
        for update in self.driver.updates[self.reported :]:
            name = update.request_id
            spec = self.specs[name]
            output = spec.generated_token_ids + self.driver.output(name)
            expected = undisturbed_output(spec.prompt_token_ids, len(output))
            assert len(self.driver.output(name)) <= max(0, spec.max_tokens - len(spec.generated_token_ids))
            if output[-1:] == (STOP,):
                output, expected = output[:-1], expected[:-1]
            assert output == expected, "the output depends on what happened around it"
            if spec.sampling.num_logprobs is not None:
                assert len(update.logprobs) == len(update.new_token_ids)
            if update.finish is FinishReason.ERROR:
                assert name in self.failed
            if update.finish is not None:
                self.driver.end(name)  # exactly one
                assert not self.driver.scheduler.finish(name, FinishReason.CANCELLED, self.driver.now_s)
        self.reported = len(self.driver.updates)

    def teardown(self) -> None:
        """Whatever happened: everything that was accepted ends, once, and nothing stays behind."""
        if not hasattr(self, "driver"):
            return
        self.driver.run(max_steps=3000)
        self.reports_are_right()
        assert all(self.driver.end(name) for name in self.specs)
        assert self.driver.is_empty()
        stats = self.driver.scheduler.stats()
        self.seen["preemptions"] += stats.num_preemptions
        self.seen["prefix_hits"] += stats.prefix_hit_tokens
        self.seen["errors"] += len(self.failed)
        self.seen["pending"] += sum(row.is_pending for plan in self.driver.plans for row in plan.rows)
        self.seen["wasted"] += self.driver.num_wasted
        self.seen.update(update.finish for update in self.driver.updates if update.finish)


class LookaheadMachine(SchedulerMachine):
    """The same with the next step planned while one is in flight."""

    num_lookahead_steps = 1
    quick = settings(QUICK, max_examples=100)
