"""When a choice is let in: it waits for the sibling that computes its prompt, and stands in nobody's way."""

import pytest

from scheduler.scheduler_config import Policy
from scheduler.spec import FinishReason
from tests.scheduler.driving import (
    STOP,
    Driver,
    make_config,
    make_spec,
    ready_model,
    undisturbed_output,
)
from tests.scheduler.forking import CANCELLED, LENGTH, PROMPT, choices, ids_of


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


def test_choices_that_found_no_slot_fork_from_whichever_sibling_runs() -> None:
    driver = Driver(make_config(max_num_seqs=2, prefix_caching=False))
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


def test_static_groups_form_with_a_slot_kept_for_each_choice() -> None:
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


def test_a_static_group_is_not_refilled_with_choices_that_found_no_slot_in_it() -> None:
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


@pytest.mark.parametrize(("group", "finish"), [("job", LENGTH), (None, FinishReason.EXPIRED)])
def test_a_deadline_counts_only_the_prompt_that_a_choice_computes_itself(
    group: str | None, finish: FinishReason
) -> None:
    """A prompt takes 0.27 s: one of it is done in time, two are not."""
    driver = Driver(make_config(num_blocks=256, max_model_len=1024), ready_model())
    driver.add(*choices(2, range(200), 2, deadline_s=0.4, fork_group=group))
    driver.run()
    assert (driver.finish_of("c0"), driver.finish_of("c1")) == (LENGTH, finish)
