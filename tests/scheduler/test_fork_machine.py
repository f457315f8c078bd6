"""Any sequence of events again, with jobs of several choices in it, and members that come late to their group."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from scheduler.admission import BlockNeed
from scheduler.forks import Forks
from scheduler.plan import RowResult, SamplingParams, ScheduledRow
from scheduler.request import Request, RequestStatus
from scheduler.scheduler_config import SchedulerConfig
from scheduler.spec import RequestSpec, ServiceClass
from scheduler.state import State
from tests.scheduler.driving import STOP, PagedModel, RaisingModel, make_spec, undisturbed_output
from tests.scheduler.machine import CONTROL, QUICK, SchedulerMachine, configs, first_sizes, run_until_seen

BROKEN = -1
"""What the slots of a failed row hold."""


class ModelWithNan(PagedModel):
    """A row whose context is broken fails as well, as it does with NaN."""

    def _row(self, row: ScheduledRow, *, fails: bool) -> RowResult:
        last = row.num_computed_tokens - 1
        is_broken = last >= 0 and self._kv[self._kv_slot(row, last)] == BROKEN
        return super()._row(row, fails=fails or is_broken)


class ForkMachine(SchedulerMachine):
    model: ClassVar[type[PagedModel]] = ModelWithNan

    @initialize(
        config=configs, is_measured=st.booleans(), sizes=first_sizes, num_shared=st.sampled_from([3, 5, 7])
    )
    def start(
        self, config: SchedulerConfig, is_measured: bool, sizes: list[tuple[int, int]], num_shared: int = 3
    ) -> None:
        """Begin with two choices whose prompt ends inside a block, so that every sequence can fork and copy."""
        super().start(config, is_measured, sizes)
        model, self.driver.model = self.driver.model, self.model(self.driver.config)
        self.driver.model.stop_after = model.stop_after
        stops = frozenset((STOP,))
        spec = make_spec("", (1,) * num_shared, 6, stop_token_ids=stops, fork_group="first")
        for _ in range(2):
            self.add_spec(spec, stop_after=0)

    @rule(
        count=st.integers(2, 6),
        num_prompt=st.integers(1, 14),
        max_tokens=st.integers(1, 12),
        service_class=st.sampled_from(list(ServiceClass)),
        tpot_s=st.sampled_from([None, 0.02]),
        deadline_after_s=st.sampled_from([None, None, 0.3]),
        resumed=st.lists(st.integers(0, 5), min_size=6, max_size=6),
        is_fresh=st.booleans(),
    )
    def add_choices(
        self, count: int, num_prompt: int, deadline_after_s: float | None, resumed: list[int], is_fresh: bool,
        **fields: Any,
    ) -> None:  # fmt: skip
        prompt, now_s = tuple(i // 3 % 2 for i in range(num_prompt)), self.driver.now_s
        spec = RequestSpec(
            request_id="",
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=0),
            arrival_s=now_s,
            stop_token_ids=frozenset((STOP,)),
            deadline_s=None if deadline_after_s is None else now_s + deadline_after_s,
            fork_group=f"g{len(self.specs)}",
            **fields,
        )
        for num_known in resumed[:count]:
            known = undisturbed_output(prompt, 0 if is_fresh else num_known)
            self.add_member(replace(spec, generated_token_ids=known))

    @precondition(lambda self: any(spec.fork_group for spec in self.specs.values()))
    @rule(data=st.data())
    def add_late(self, data: st.DataObject) -> None:
        """To a group whose other members may wait, run, leave or have ended."""
        members = [spec for spec in self.specs.values() if spec.fork_group]
        self.add_member(data.draw(st.sampled_from(members)))

    def prompts_in_flight(self) -> list[str]:
        """Members whose prompt the next result is about."""
        rows = self.driver.in_flight[0].rows if self.driver.in_flight else ()
        specs = [(row, self.specs[row.request_id]) for row in rows]
        return [
            spec.request_id
            for row, spec in specs
            if spec.fork_group and row.num_computed_tokens < len(spec.prompt_token_ids)
        ]

    @precondition(lambda self: self.prompts_in_flight())
    @rule(data=st.data())
    def fail_prompt(self, data: st.DataObject) -> None:
        """When all that may be planned meanwhile is out: this is rare among the other rules."""
        failing = data.draw(st.sampled_from(self.prompts_in_flight()))
        self.driver.plan_ahead()
        self.driver.collect()
        self.failed.add(failing)
        self.driver.complete(self.driver.in_flight[0], {failing})

    def add_member(self, spec: RequestSpec) -> None:
        self.add_spec(spec, stop_after=3 + len(self.specs) % 9)

    @invariant()
    def a_shared_prompt_counts_once(self) -> None:
        own, prompts, running = 0, {}, set()
        for request in self.driver.scheduler._state.requests.values():
            name, num_prompt = request.spec.fork_group, len(request.spec.prompt_token_ids)
            if request.status is RequestStatus.RUNNING:
                running.add(name)
            elif name is None:
                own += request.num_tokens
            else:
                own += request.num_tokens - num_prompt
                prompts[name] = num_prompt
        shared = sum(count for name, count in prompts.items() if name not in running)
        assert self.driver.scheduler.stats().waiting_tokens == own + shared

    @invariant()
    def reports_are_right(self) -> None:
        """With look-ahead, forks of a request whose failure was not known yet end with it."""
        if self.num_lookahead_steps:
            groups = {self.specs[name].fork_group for name in self.failed} - {None}
            self.failed |= {name for name, spec in self.specs.items() if spec.fork_group in groups}
        super().reports_are_right()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "driver"):
            self.seen["forks"] += self.driver.scheduler.stats().num_forks
            self.seen["copies"] += sum(len(plan.block_copies) for plan in self.driver.plans)


class LookaheadForkMachine(ForkMachine):
    num_lookahead_steps: ClassVar[int] = 1


class RaisingForkMachine(ForkMachine):
    model: ClassVar[type[PagedModel]] = RaisingModel


class LookaheadRaisingForkMachine(LookaheadForkMachine):
    """Nothing but the scheduler knows that a fork read what was never written."""

    model: ClassVar[type[PagedModel]] = RaisingModel


MACHINES = [ForkMachine, LookaheadForkMachine, RaisingForkMachine, LookaheadRaisingForkMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_any_sequence_of_events_keeps_books_slots_and_outputs_right(machine: type[ForkMachine]) -> None:
    run_until_seen(machine, QUICK, {"preemptions", "errors", "forks", "copies"})


def never_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedModel, "_copy", lambda self, source, destination: None)


def lends_what_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forks, "_is_ready", lambda self, member, group: True)


def does_not_hold_what_a_fork_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = State.admit

    def admit_unheld(self: State, request: Request, need: BlockNeed) -> None:
        admit(self, request, need)
        if need.lender is not None:
            self.pool.release(need.shared)

    monkeypatch.setattr(State, "admit", admit_unheld)


def never_lets_a_sibling_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forks, "lender", lambda self, request: None)
    monkeypatch.setattr(Forks, "must_wait", lambda self, request: request.spec.fork_group is not None)


def counts_each_choice_s_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "waiting_tokens", property(lambda self: self.waiting.num_tokens))


def trusts_the_forks_of_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forks, "borrowed", lambda self, fork, lender, num_tokens: None)


def test_control_forks_that_outlive_the_row_they_depend_on_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trusts_the_forks_of_a_failed_row(monkeypatch)
    with pytest.raises(AssertionError, match="the output depends on what happened around it"):
        run_state_machine_as_test(LookaheadRaisingForkMachine, settings=CONTROL)


@pytest.mark.parametrize(
    "sabotage",
    [
        never_copies,
        lends_what_is_not_computed,
        does_not_hold_what_a_fork_shares,
        never_lets_a_sibling_go,
        counts_each_choice_s_prompt,
    ],
)
def test_control_each_mechanism_switched_off_is_noticed(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(ForkMachine, settings=CONTROL)
