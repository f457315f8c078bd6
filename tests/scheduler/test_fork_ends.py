"""What the end of one choice, good or bad, means for its siblings."""

import pytest

from scheduler.scheduler_config import Policy
from tests.scheduler.driving import (
    Driver,
    make_config,
    make_spec,
    undisturbed_output,
)
from tests.scheduler.forking import CANCELLED, ERROR, LENGTH, PROMPT, choices, ids_of, run_to_end


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
    driver = Driver(make_config(num_blocks=8, max_num_seqs=4, watermark_blocks=0, prefix_caching=False))
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
    driver = Driver(make_config(prefix_caching=has_cache))
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
    assert driver.plan() is None, "the slots are free when the rows in flight have returned"
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
