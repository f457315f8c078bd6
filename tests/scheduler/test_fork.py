"""Choices of one job: the prompt is computed once, its blocks exist once, and outputs are those of requests alone."""

from collections.abc import Iterable
from typing import Any

import pytest

from scheduler.config import Policy
from scheduler.forks import Forks
from scheduler.plan import StepPlan
from scheduler.spec import FinishReason, RequestSpec, ServiceClass
from scheduler.state import State
from tests.scheduler.driving import (
    STOP,
    Driver,
    PagedModel,
    make_config,
    make_spec,
    ready_model,
    undisturbed_output,
)

PROMPT = tuple(range(500, 510))
CANCELLED, ERROR, LENGTH = FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.LENGTH


def choices(
    count: int, prompt: Iterable[int] = PROMPT, max_tokens: int = 6, **changes: Any
) -> list[RequestSpec]:
    """What a job with n = count becomes."""
    prompt = tuple(prompt)
    return [make_spec(f"c{i}", prompt, max_tokens, **({"fork_group": "job"} | changes)) for i in range(count)]


def num_computed(driver: Driver) -> int:
    return sum(plan.num_tokens for plan in driver.plans)


def ids_of(plan: StepPlan) -> list[str]:
    return [row.request_id for row in plan.rows]


def run_to_end(driver: Driver, num_choices: int, max_tokens: int = 6) -> None:
    driver.run()
    for i in range(num_choices):
        assert driver.finish_of(f"c{i}") is LENGTH
        assert driver.output(f"c{i}") == undisturbed_output(PROMPT, max_tokens)
    assert driver.is_empty()


@pytest.mark.parametrize("has_cache", [True, False])
def test_eight_choices_hold_the_full_prompt_blocks_once_and_one_block_each(has_cache: bool) -> None:
    config = make_config(
        num_blocks=64,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        enable_prefix_caching=has_cache,
    )
    driver = Driver(config)
    driver.add(*choices(8, range(100), 20))
    first = driver.step()
    assert [(row.request_id, len(row.token_ids)) for row in first.rows] == [("c0", 100)]
    second = driver.step()
    assert [len(row.token_ids) for row in second.rows] == [1] * 8
    assert len(second.block_copies) == 7
    assert {source for source, _ in second.block_copies} == {first.rows[0].block_table[6]}
    assert driver.scheduler.stats().held_blocks == 6 + 8
    assert driver.scheduler.stats().num_forks == 7
    third = driver.step()
    assert [row.num_computed_tokens for row in third.rows] == [101] + [100] * 7
    assert driver.scheduler.stats().held_blocks == 6 + 8
    driver.run()
    assert all(driver.output(f"c{i}") == undisturbed_output(range(100), 20) for i in range(8))


@pytest.mark.parametrize(
    ("num_prompt", "num_shared", "num_copies"), [(97, 6, 0), (96, 5, 7), (95, 5, 7), (16, 0, 7), (1, 0, 0)]
)
def test_only_a_block_that_the_last_prompt_token_shares_with_others_is_copied(
    num_prompt: int, num_shared: int, num_copies: int
) -> None:
    """The last token is computed again in each choice, into a block of its own: its logits are wanted."""
    driver = Driver(make_config(num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=128))
    driver.add(*choices(8, range(num_prompt), 5))
    driver.step()
    second = driver.step()
    assert len(second.block_copies) == num_copies
    shared = set.intersection(*(set(row.block_table) for row in second.rows))
    assert len(shared) == num_shared
    driver.run()
    assert all(driver.output(f"c{i}") == undisturbed_output(range(num_prompt), 5) for i in range(8))
    assert num_computed(driver) == num_prompt + 7 + 8 * 4


@pytest.mark.parametrize("num_choices", [1, 4, 16])
def test_a_prompt_of_a_thousand_tokens_is_computed_once_in_chunks(num_choices: int) -> None:
    driver = Driver(
        make_config(
            num_blocks=128, block_size=16, max_num_seqs=16, max_model_len=1024, max_num_batched_tokens=256,
            enable_prefix_caching=False,
        )
    )  # fmt: skip
    driver.add(*choices(num_choices, range(1000), 2))
    driver.run()
    assert num_computed(driver) == 1000 + (num_choices - 1) + num_choices
    assert [ids_of(plan) for plan in driver.plans[:4]] == [["c0"]] * 4


def test_control_without_a_group_each_choice_computes_the_prompt() -> None:
    driver = Driver(make_config(max_num_batched_tokens=64))
    driver.add(*choices(4, fork_group=None))
    run_to_end(driver, 4)
    assert num_computed(driver) == 4 * (10 + 5)


def test_control_without_the_copies_outputs_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedModel, "_copy", lambda self, source, destination: None)
    driver = Driver()
    driver.add(*choices(4))
    with pytest.raises((AssertionError, KeyError)):
        run_to_end(driver, 4)


def test_others_are_admitted_past_a_choice_that_waits_for_its_sibling_and_do_not_count() -> None:
    driver = Driver(
        make_config(max_num_seqs=8, max_bypasses=0, max_blocked_scan=0, max_num_batched_tokens=16)
    )
    driver.add(*choices(6, range(12), 4), make_spec("other", 4, 4, arrival_s=1.0))
    assert ids_of(driver.step()) == ["c0", "other"]
    blocked = driver.scheduler.stats().blocked
    assert blocked is not None
    assert (blocked.request_id, blocked.reason, blocked.num_bypassed) == ("c1", "fork", 0)
    assert set(ids_of(driver.step())) == {*(f"c{i}" for i in range(6)), "other"}
    driver.run()
    assert driver.is_empty()


def test_hazard_many_waiting_choices_hide_the_rest_of_the_queue() -> None:
    driver = Driver(make_config(max_num_seqs=2, max_blocked_scan=0, max_num_batched_tokens=8))
    driver.add(*choices(16, range(12), 2), make_spec("other", 2, 2, arrival_s=1.0))
    driver.step()
    driver.step()
    assert "other" in ids_of(driver.plans[-1])
    driver.run()


def test_choices_behind_a_blocked_sibling_are_not_looked_at_before_it_gets_in() -> None:
    driver = Driver(make_config(num_blocks=16, max_num_seqs=8, max_blocked_scan=1, watermark_blocks=0))
    driver.add(make_spec("big", 32, 8))
    driver.step()
    driver.add(*choices(6, range(40), 4), make_spec("small", 4, 4, arrival_s=1.0))
    assert set(ids_of(driver.step())) == {"big", "small"}
    blocked = driver.scheduler.stats().blocked
    assert blocked is not None
    assert (blocked.request_id, blocked.reason, blocked.num_bypassed) == ("c0", "blocks", 1)
    assert driver.scheduler._state.requests["c1"].num_bypassed == 0
    driver.run()
    assert driver.is_empty()


def test_choices_that_found_no_seat_fork_from_whichever_sibling_runs() -> None:
    driver = Driver(make_config(max_num_seqs=2, enable_prefix_caching=False))
    specs = choices(6, max_tokens=6)
    driver.add(*specs)
    driver.step()
    driver.step()
    driver.scheduler.finish("c0", CANCELLED, driver.now_s)
    driver.run()
    for i in range(1, 6):
        assert driver.output(f"c{i}") == undisturbed_output(PROMPT, 6)
    prefills = [row.request_id for plan in driver.plans for row in plan.rows if row.num_computed_tokens == 0]
    assert prefills == ["c0"], "there was always one to fork from"
    assert driver.is_empty()


@pytest.mark.parametrize(
    "state", ["waiting", "prefill", "prefill in flight", "first step in flight", "decode"]
)
def test_the_leader_is_cancelled_in_every_state(state: str) -> None:
    driver = Driver(make_config(max_num_batched_tokens=4))
    driver.add(*choices(3))
    plan = None
    if state == "prefill":
        driver.step()
    elif state == "prefill in flight":
        plan = driver.plan()
    elif state != "waiting":
        for _ in range(3):
            driver.step()
        assert driver.output("c0")
        plan = driver.plan() if state == "first step in flight" else None
        if state == "decode":
            driver.step()
    assert driver.scheduler.finish("c0", CANCELLED, driver.now_s)
    if plan is not None:
        assert bool(plan.block_copies) == (state == "first step in flight")
        driver.complete(plan)
    driver.run()
    assert driver.finish_of("c0") is CANCELLED
    for name in ("c1", "c2"):
        assert driver.output(name) == undisturbed_output(PROMPT, 6)
    assert driver.is_empty()


def test_the_leader_ends_in_the_step_that_its_forks_start_in_and_its_blocks_go_to_others() -> None:
    driver = Driver(
        make_config(num_blocks=8, max_num_seqs=4, watermark_blocks=0, enable_prefix_caching=False)
    )
    driver.add(*choices(3, max_tokens=6), make_spec("next", 8, 4, arrival_s=1.0))
    driver.step()
    plan = driver.plan()
    assert plan is not None
    assert len(plan.block_copies) == 2
    driver.scheduler.finish("c0", CANCELLED, driver.now_s)
    driver.complete(plan)
    driver.run()
    assert [driver.output(name) for name in ("c1", "c2")] == [undisturbed_output(PROMPT, 6)] * 2
    assert driver.output("next") == undisturbed_output(make_spec("next", 8).prompt_token_ids, 4)
    assert driver.is_empty()


@pytest.mark.parametrize("has_cache", [True, False])
def test_nobody_reads_the_blocks_of_a_leader_whose_row_failed(has_cache: bool) -> None:
    driver = Driver(make_config(enable_prefix_caching=has_cache))
    driver.add(*choices(3))
    first = driver.step(failing={"c0"})
    second = driver.step()
    assert driver.finish_of("c0") is ERROR
    assert second.block_copies == ()
    assert [(row.request_id, row.num_computed_tokens) for row in second.rows] == [("c1", 0)]
    assert ids_of(first) == ["c0"]
    driver.run()
    assert [driver.output(name) for name in ("c1", "c2")] == [undisturbed_output(PROMPT, 6)] * 2


def test_a_sibling_that_shares_blocks_with_a_failed_one_lends_them_to_nobody_more() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    driver.add(*choices(3))
    driver.step()
    driver.step()
    third = driver.step(failing={"c0"})
    assert set(ids_of(third)) == {"c0", "c1"}
    fourth = driver.step()
    assert [(row.request_id, row.num_computed_tokens) for row in fourth.rows] == [("c1", 11), ("c2", 0)]
    driver.run()
    assert [driver.output(name) for name in ("c1", "c2")] == [undisturbed_output(PROMPT, 6)] * 2


def test_a_cancelled_row_that_turns_out_broken_is_not_borrowed_from_either() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    driver.add(*choices(3))
    driver.step()
    driver.step()
    plan = driver.plan()
    assert plan is not None
    driver.scheduler.finish("c0", CANCELLED, driver.now_s)
    driver.complete(plan, failing={"c0"})
    assert [(row.request_id, row.num_computed_tokens) for row in driver.step().rows] == [
        ("c1", 11),
        ("c2", 0),
    ]
    driver.run()
    assert driver.is_empty()


def test_a_preempted_fork_comes_back_with_the_prompt_and_computes_only_its_own_tokens() -> None:
    driver = Driver(
        make_config(num_blocks=10, max_num_seqs=3, watermark_blocks=0, enable_prefix_caching=False)
    )
    driver.model.stop_after["c1"] = 9
    stops = frozenset((STOP,))
    driver.add(*choices(3, max_tokens=14, stop_token_ids=stops))
    driver.run()
    for name in ("c0", "c2"):
        assert driver.output(name) == undisturbed_output(PROMPT, 14)
    assert driver.is_empty()
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_forks > 2
    prompts = [row for plan in driver.plans for row in plan.rows if row.num_computed_tokens == 0]
    assert [row.request_id for row in prompts] == ["c0"]


def test_a_preempted_request_takes_its_own_cached_blocks_where_they_reach_further_than_the_prompt() -> None:
    driver = Driver(make_config(max_num_seqs=2, max_num_batched_tokens=64))
    batch = ServiceClass.BATCH
    driver.add(*choices(2, max_tokens=30, service_class=batch))
    while len(driver.output("c1")) < 9:
        driver.step()
    driver.add(make_spec("high", 2, 1, service_class=ServiceClass.INTERACTIVE, arrival_s=driver.now_s))
    driver.step()
    assert driver.scheduler.stats().num_preempted == 1
    again = next(row for row in driver.step().rows if row.request_id == "c1")
    assert again.num_computed_tokens == 16
    driver.run()
    assert driver.output("c1") == undisturbed_output(PROMPT, 30)


def test_resumed_choices_share_the_prompt_and_compute_their_own_tokens() -> None:
    whole = undisturbed_output(PROMPT, 9)
    driver = Driver(make_config(max_num_batched_tokens=64, enable_prefix_caching=False))
    driver.add(
        *(
            make_spec(f"c{i}", PROMPT, 9, fork_group="job", generated_token_ids=whole[:known])
            for i, known in enumerate((5, 0, 3, 9))
        )
    )
    assert [(row.request_id, len(row.token_ids)) for row in driver.step().rows] == [("c0", 15)]
    second = {row.request_id: row for row in driver.step().rows}
    assert (second["c1"].num_computed_tokens, second["c1"].token_ids) == (9, PROMPT[9:])
    assert (second["c2"].num_computed_tokens, second["c2"].token_ids) == (10, whole[:3])
    driver.run()
    for i, known in enumerate((5, 0, 3, 9)):
        assert driver.output(f"c{i}") == whole[known:]
    assert driver.is_empty()


def test_copies_of_one_plan_never_chain_even_if_a_resumed_fork_could_lend_at_once() -> None:
    """c1 came first and has the whole prompt as soon as it is admitted, but its last block only when the plan runs."""
    whole = undisturbed_output(PROMPT, 8)
    driver = Driver(make_config(enable_prefix_caching=False))
    for name, known, arrival_s in (("c1", 3, 1.0), ("c0", 0, 0.0), ("c2", 3, 2.0)):
        driver.add(
            make_spec(
                name, PROMPT, 8, fork_group="job", generated_token_ids=whole[:known], arrival_s=arrival_s
            )
        )
    [first] = driver.step().rows
    assert first.request_id == "c0"
    assert [source for source, _ in driver.step().block_copies] == [first.block_table[2]] * 2
    driver.run()
    assert [driver.output(name) for name in ("c0", "c1", "c2")] == [whole, whole[3:], whole[3:]]


def test_a_fork_that_gives_way_in_the_round_that_admits_it_leaves_no_copy() -> None:
    driver = Driver(make_config(max_num_seqs=2, ageing_s=1.0))
    batch, interactive = ServiceClass.BATCH, ServiceClass.INTERACTIVE
    first, second = choices(2, max_tokens=20, service_class=batch)
    driver.add(first)
    driver.step()
    driver.now_s = 100.0
    driver.add(second, make_spec("high", 4, 2, service_class=interactive, arrival_s=100.0))
    plan = driver.step()
    assert (ids_of(plan), plan.block_copies) == (["c0", "high"], ())
    assert driver.scheduler.stats().num_forks == 1
    run_to_end(driver, 2, max_tokens=20)


def test_a_copy_s_source_is_nobody_s_to_write_until_its_step_is_back() -> None:
    """The lender may give way to a higher class in the very round that its fork was admitted in."""
    driver = Driver(make_config())
    state = State(driver.config)
    [held] = state.pool.allocate(1)
    state.forks.copy(held, state.pool.allocate(1)[0])
    state.pool.release((held,))
    assert held not in state.pool.allocate(state.pool.num_available)
    copies = state.forks.take_copies()
    assert [source for source, _ in copies] == [held]
    assert state.pool.num_available == 0, "the step may have to run again"
    state.forks.copied(copies)
    assert state.pool.num_free == 1
    state.pool.check()


def test_copies_for_a_fork_that_gives_its_blocks_back_before_the_plan_are_dropped() -> None:
    pool = Driver().scheduler.pool
    forks = Forks(pool)
    source, kept, dropped = pool.allocate(3)
    forks.copy(source, kept)
    forks.copy(source, dropped)
    forks.cancel_copies((dropped,))
    assert forks.take_copies() == ((source, kept),)
    forks.copied(((source, kept),))
    pool.release((source, kept, dropped))
    pool.check()
    assert pool.num_held == 0


def test_static_groups_form_with_a_seat_kept_for_each_choice() -> None:
    driver = Driver(make_config(policy=Policy.STATIC, max_num_seqs=4, max_num_batched_tokens=16))
    driver.add(
        *choices(3, range(12), 4),
        *(make_spec(name, 4, 9, arrival_s=1.0) for name in ("first", "second")),
    )
    assert ids_of(driver.step()) == ["c0", "first"]
    assert set(ids_of(driver.step())) == {"c0", "c1", "c2", "first"}
    while not driver.has_ended("first"):
        assert "second" not in ids_of(driver.step())
    driver.run()
    assert driver.is_empty()


def test_a_static_group_is_not_refilled_with_choices_that_found_no_seat_in_it() -> None:
    driver = Driver(make_config(policy=Policy.STATIC, max_num_seqs=2))
    driver.model.stop_after["c0"] = 2
    stops = frozenset((STOP,))
    driver.add(*choices(4, max_tokens=5, stop_token_ids=stops))
    groups: list[set[str]] = []
    while (plan := driver.plan()) is not None:
        ids = set(ids_of(plan))
        if groups and ids & groups[-1]:
            groups[-1] |= ids
        else:
            groups.append(ids)
        driver.complete(plan)
    assert groups == [{"c0", "c1"}, {"c2", "c3"}]
    assert driver.scheduler.stats().num_forks == 2


def test_a_static_group_whose_leader_fails_lets_the_sibling_in_on_its_own() -> None:
    driver = Driver(make_config(policy=Policy.STATIC, max_num_seqs=3))
    driver.add(*choices(2), make_spec("other", 4, 12, arrival_s=1.0))
    driver.step(failing={"c0"})
    assert [(row.request_id, row.num_computed_tokens) for row in driver.step().rows] == [
        ("other", 4),
        ("c1", 0),
    ]
    driver.run()
    assert driver.output("c1") == undisturbed_output(PROMPT, 6)


def test_the_queue_counts_a_shared_prompt_once() -> None:
    driver = Driver(make_config(num_blocks=256, max_num_seqs=2, max_model_len=1024))
    driver.add(*choices(8, range(100), 4))
    assert driver.scheduler.stats().waiting_tokens == 100
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.waiting_tokens, stats.prefill_backlog_tokens) == (0, 68)
    driver.scheduler.finish("c0", CANCELLED, driver.now_s)
    assert driver.scheduler.stats().waiting_tokens == 100
    alone = Driver(make_config(num_blocks=256, max_num_seqs=2, max_model_len=1024))
    alone.add(*choices(8, range(100), 4, fork_group=None))
    assert alone.scheduler.stats().waiting_tokens == 800
    driver.run()
    assert driver.scheduler.stats().waiting_tokens == 0


def test_cached_tokens_are_those_that_the_leader_found() -> None:
    driver = Driver()
    driver.add(make_spec("before", PROMPT[:9], 1))
    driver.run()
    driver.add(*choices(3))
    driver.run()
    assert [driver.end(f"c{i}").num_cached_tokens for i in range(3)] == [8, 8, 8]
    stats = driver.scheduler.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (9 + 10, 8)


def test_a_fork_is_found_by_later_requests_as_any_other_is() -> None:
    driver = Driver()
    driver.add(*choices(2, max_tokens=8))
    driver.run()
    longer = PROMPT + driver.output("c1")
    driver.add(make_spec("later", longer, 2))
    assert driver.step().rows[0].num_computed_tokens == 16


@pytest.mark.parametrize(
    "changes", [{"prompt": PROMPT[:-1]}, {"tenant": "b"}, {"service_class": ServiceClass.BATCH}]
)
def test_a_group_has_one_prompt_one_tenant_and_one_class(changes: dict[str, Any]) -> None:
    driver = Driver()
    driver.add(*choices(1))
    other = make_spec("c1", **{"prompt": PROMPT, "fork_group": "job", **changes})
    with pytest.raises(AssertionError, match="c1 forks"):
        driver.scheduler.add(other, 0.0)
    run_to_end(driver, 1)


def test_a_group_s_name_may_come_again_with_another_prompt() -> None:
    driver = Driver()
    driver.add(*choices(2))
    driver.step()
    for i in range(2):
        driver.scheduler.finish(f"c{i}", CANCELLED, driver.now_s)
    driver.collect()
    driver.updates.clear()
    driver.add(*choices(2, range(7)))
    driver.run()
    assert driver.output("c1") == undisturbed_output(range(7), 6)


@pytest.mark.parametrize(("group", "finish"), [("job", LENGTH), (None, FinishReason.EXPIRED)])
def test_a_deadline_counts_only_the_prompt_that_a_choice_computes_itself(
    group: str | None, finish: FinishReason
) -> None:
    """A prompt takes 0.27 s: one of it is done in time, two are not."""
    driver = Driver(make_config(num_blocks=256, max_model_len=1024), ready_model())
    driver.add(*choices(2, range(200), 2, deadline_s=0.4, fork_group=group))
    driver.run()
    assert (driver.finish_of("c0"), driver.finish_of("c1")) == (LENGTH, finish)


def test_with_look_ahead_choices_start_in_the_step_after_the_prompt_before_its_result_is_known() -> None:
    driver = Driver(make_config(num_lookahead_steps=1))
    driver.add(*choices(3))
    first, second = driver.plan(), driver.plan()
    assert first is not None
    assert second is not None
    assert ids_of(first) == ["c0"]
    assert [(row.request_id, row.is_pending) for row in second.rows] == [
        ("c0", True), ("c1", False), ("c2", False),
    ]  # fmt: skip
    assert len(second.block_copies) == 2
    run_to_end(driver, 3)


def test_with_look_ahead_only_choices_that_were_planned_before_the_failure_was_known_share_it() -> None:
    driver = Driver(make_config(num_lookahead_steps=1, max_num_seqs=3))
    driver.add(*choices(5))
    first, second = driver.plan(), driver.plan()
    assert first is not None
    assert second is not None
    driver.complete(first, failing={"c0"})
    assert driver.plan() is None, "the seats are free when the rows that are out are back"
    driver.complete(second, failing={"c0"})
    third = driver.plan()
    assert third is not None
    assert [(row.request_id, row.num_computed_tokens) for row in third.rows] == [("c3", 0)]
    driver.run()
    assert [driver.finish_of(f"c{i}") for i in range(5)] == [ERROR, ERROR, ERROR, LENGTH, LENGTH]
    assert [driver.output(name) for name in ("c3", "c4")] == [undisturbed_output(PROMPT, 6)] * 2
    assert driver.is_empty()


def test_with_look_ahead_a_fork_makes_the_prompt_findable_that_its_cancelled_sibling_did_not() -> None:
    driver = Driver(make_config(num_lookahead_steps=1))
    driver.add(*choices(2))
    driver.plan()
    driver.plan()
    driver.scheduler.finish("c0", CANCELLED, driver.now_s)
    driver.run()
    driver.add(make_spec("later", PROMPT, 2))
    assert driver.step().rows[0].num_computed_tokens == 8
