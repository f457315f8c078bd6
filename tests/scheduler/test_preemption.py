"""Too few blocks, and classes that must not wait for each other."""

from typing import Any

import pytest

from scheduler import policy
from scheduler.spec import FinishReason, ServiceClass
from tests.scheduler.driving import Driver, make_config, make_spec, undisturbed_output

INTERACTIVE, STANDARD, BATCH = ServiceClass.INTERACTIVE, ServiceClass.STANDARD, ServiceClass.BATCH


def test_a_preempted_request_keeps_its_tokens_and_its_output_is_undisturbed() -> None:
    driver = Driver(make_config(num_blocks=10, max_num_seqs=4))
    prompts = {name: tuple(range(100 * i, 100 * i + 6)) for i, name in enumerate("abcd")}
    driver.add(*(make_spec(name, prompt, 20) for name, prompt in prompts.items()))
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    for name, prompt in prompts.items():
        assert driver.output(name) == undisturbed_output(prompt, 20)
        assert driver.end(name).num_cached_tokens == 0, "own blocks found again are not a cached prompt"
    assert driver.is_empty()


def test_the_latest_of_the_lowest_class_gives_way() -> None:
    driver = Driver(make_config(num_blocks=6, max_num_seqs=3, watermark_blocks=0))
    driver.add(
        make_spec("batch", 4, 12, service_class=BATCH),
        make_spec("first", 4, 12),
        make_spec("second", 4, 12),
    )
    preempted: list[str] = []
    running: set[str] = set()
    while (plan := driver.plan()) is not None:
        now = {row.request_id for row in plan.rows}
        preempted += [name for name in running - now if not driver.has_ended(name)]
        running = now
        driver.complete(plan)
    assert preempted[0] == "batch"
    assert "first" not in preempted


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    driver = Driver(make_config(num_blocks=6, max_num_seqs=4, watermark_blocks=0))
    driver.add(make_spec("a", 8, 12), make_spec("b", 8, 12), make_spec("tiny", 1, 1, arrival_s=1.0))
    before = 0
    while (plan := driver.plan()) is not None:
        stats = driver.scheduler.stats()
        if stats.num_preemptions > before:
            starts = [
                row for row in plan.rows if row.num_generated_tokens == 0 and row.num_computed_tokens == 0
            ]
            assert starts == []
            assert stats.blocked is not None
            assert stats.blocked.reason == "preemption"
        before = stats.num_preemptions
        driver.complete(plan)
    assert before > 0


def scheduled_tokens(driver: Driver) -> int:
    return sum(plan.num_tokens for plan in driver.plans)


def run_thrashing(**changes: Any) -> Driver:
    """Many long requests on a pool that holds less than three of them. No cache: all recomputing counts."""
    settings = {"num_blocks": 40, "max_num_seqs": 8, "watermark_blocks": 1, "prefix_caching": False}
    driver = Driver(make_config(max_num_batched_tokens=64, **{**settings, **changes}))
    driver.add(*(make_spec(f"r{i}", 10, 60) for i in range(12)))
    driver.run(max_steps=5000)
    return driver


def test_hazard_preempt_readd_preempt_at_zero_tokens_per_second() -> None:
    """Work done twice stays below work done once, and no request is thrown out again and again."""
    driver = run_thrashing()
    assert 0 < driver.scheduler.stats().num_preemptions <= 2 * 12
    assert scheduled_tokens(driver) <= 1.6 * 12 * (10 + 60 - 1)


def test_control_without_headroom_requests_thrash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.admission.headroom_blocks", lambda *_: 0)
    driver = run_thrashing()
    assert driver.scheduler.stats().num_preemptions > 2 * 12
    assert scheduled_tokens(driver) > 1.6 * 12 * (10 + 60 - 1)


def test_hazard_throughput_never_recovers_after_preemption() -> None:
    """Once the pressure is gone, steps are as full as before it."""
    driver = Driver(make_config(num_blocks=16, max_num_seqs=4))
    driver.add(*(make_spec(f"long{i}", 6, 40) for i in range(4)))
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    start = len(driver.plans)
    driver.add(*(make_spec(f"short{i}", 4, 4) for i in range(8)))
    driver.run()
    assert [len(plan.rows) for plan in driver.plans[start:]] == [4] * 8


def test_headroom_grows_with_preemptions_and_is_never_asked_of_an_empty_pool() -> None:
    grown = [policy.headroom_blocks(2, 3, num_preemptions, 20) for num_preemptions in (0, 1, 2, 9)]
    assert grown == [2, 10, 20, 20]
    assert policy.headroom_blocks(2, 0, 9, 20) == 0


def test_hazard_high_priority_waits_behind_low_once_all_slots_are_taken() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    driver.add(*(make_spec(f"low{i}", 4, 40, service_class=BATCH) for i in range(2)))
    driver.step()
    driver.add(make_spec("high", 4, 3, service_class=INTERACTIVE, arrival_s=driver.now_s))
    plan = driver.step()
    assert {row.request_id for row in plan.rows} == {"low0", "high"}, "the later of the two gave way"
    assert plan.released_slots == (1,)
    driver.run()
    assert driver.output("low1") == undisturbed_output(make_spec("low1").prompt_token_ids, 40)


def test_control_without_priority_preemption_the_high_one_waits() -> None:
    driver = Driver(make_config(max_num_seqs=2, max_priority_preemptions=0))
    driver.add(*(make_spec(f"low{i}", 4, 40, service_class=BATCH) for i in range(2)))
    driver.step()
    driver.add(make_spec("high", 4, 3, service_class=INTERACTIVE, arrival_s=driver.now_s))
    assert {row.request_id for row in driver.step().rows} == {"low0", "low1"}
    blocked = driver.scheduler.stats().blocked
    assert blocked is not None
    assert (blocked.request_id, blocked.reason) == ("high", "slots")


def test_high_priority_takes_blocks_from_low_when_slots_are_free() -> None:
    driver = Driver(make_config(num_blocks=10, max_num_seqs=4))
    driver.add(*(make_spec(f"low{i}", 12, 4, service_class=BATCH) for i in range(2)))
    driver.step()
    driver.add(make_spec("high", 16, 3, service_class=STANDARD))
    assert "high" in {row.request_id for row in driver.step().rows}
    driver.run()
    assert all(driver.finish_of(name) is FinishReason.LENGTH for name in ("low0", "low1", "high"))


def test_several_high_ones_enter_in_one_step_and_their_victims_do_not_come_back_in_it() -> None:
    driver = Driver(make_config(max_num_seqs=4))
    driver.add(*(make_spec(f"low{i}", 4, 40, service_class=BATCH) for i in range(4)))
    driver.step()
    driver.add(*(make_spec(f"high{i}", 4, 3, service_class=INTERACTIVE) for i in range(3)))
    assert {row.request_id for row in driver.step().rows} == {"low0", "high0", "high1", "high2"}


def test_equals_never_preempt_each_other() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(make_spec("a", 4, 10))
    driver.step()
    driver.add(make_spec("b", 4, 10, ttft_s=0.001))
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_stream_of_high_priority_does_not_preempt_one_request_for_ever() -> None:
    driver = Driver(make_config(max_num_seqs=1, max_priority_preemptions=2, ageing_s=0.5))
    driver.add(make_spec("low", 4, 30, service_class=BATCH))
    for i in range(500):
        if not driver.scheduler.has_work or driver.has_ended("low"):
            break
        driver.add(make_spec(f"high{i}", 2, 1, service_class=INTERACTIVE, arrival_s=driver.now_s))
        driver.step()
    else:
        pytest.fail("low never ended")
    assert driver.scheduler.stats().num_preemptions == 2


def test_victims_are_the_fewest_that_help() -> None:
    driver = Driver(make_config(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=64))
    driver.add(*(make_spec(f"low{i}", 12, 4, service_class=BATCH) for i in range(4)))
    driver.step()
    assert driver.scheduler.stats().num_running == 4
    driver.add(make_spec("high", 20, 3, service_class=INTERACTIVE))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_preempted) == (3, 2)


def test_an_aged_low_request_admitted_just_before_a_high_one_gives_its_slot_back_once() -> None:
    driver = Driver(make_config(max_num_seqs=1, ageing_s=1.0))
    driver.add(make_spec("first", 4, 1))
    driver.step()
    driver.now_s = 100.0
    driver.add(make_spec("aged", 4, 5, service_class=BATCH))
    driver.add(make_spec("high", 4, 2, service_class=INTERACTIVE, arrival_s=100.0))
    plan = driver.step()
    assert [row.request_id for row in plan.rows] == ["high"]
    assert plan.released_slots == (0,)
    driver.run()
    assert driver.output("aged") == undisturbed_output(make_spec("aged").prompt_token_ids, 5)


def test_what_a_victim_leaves_over_goes_to_no_other_low_request_in_that_step() -> None:
    driver = Driver(make_config(num_blocks=16, max_num_seqs=3, max_num_batched_tokens=64))
    driver.add(make_spec("low0", 44, 12, service_class=BATCH))
    driver.step()
    driver.add(
        make_spec("low1", 24, 4, service_class=BATCH), make_spec("high", 16, 4, service_class=INTERACTIVE)
    )
    assert [row.request_id for row in driver.step().rows] == ["high"]
    assert driver.scheduler.stats().num_preempted == 1
    driver.run()
    assert all(driver.finish_of(name) is FinishReason.LENGTH for name in ("low0", "low1", "high"))


def test_blocks_that_the_candidate_shares_with_its_victim_are_not_counted_as_freed() -> None:
    driver = Driver(make_config(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=64, watermark_blocks=0))
    prompt = tuple(range(16))
    driver.add(make_spec("low", prompt, 8, service_class=BATCH))
    driver.add(make_spec("other", 5, 3, service_class=INTERACTIVE))
    driver.step()
    driver.step()
    assert driver.scheduler.stats().free_blocks == 1
    driver.add(make_spec("high", (*prompt, *range(100, 112)), 4, service_class=INTERACTIVE))
    driver.step()  # four of its seven blocks are `low`'s: without `low` there would be two others, not six
    assert driver.scheduler.stats().num_preempted == 0
    driver.run()
    assert driver.output("high") == undisturbed_output((*prompt, *range(100, 112)), 4)
    assert driver.output("low") == undisturbed_output(prompt, 8)
