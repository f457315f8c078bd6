"""Order of admission, blocked heads, and who names them."""

from typing import Any

import pytest

from scheduler.request import Request, RequestStatus
from scheduler.scheduler_config import Policy
from scheduler.spec import FinishReason, ServiceClass, due_time_s
from scheduler.waiting import Deadlines, WaitingQueue
from tests.scheduler.driving import Driver, make_config, make_spec

INTERACTIVE, STANDARD, BATCH = ServiceClass.INTERACTIVE, ServiceClass.STANDARD, ServiceClass.BATCH


def admission_order(driver: Driver) -> list[str]:
    order: list[str] = []
    for plan in driver.plans:
        order += [row.request_id for row in plan.rows if row.request_id not in order]
    return order


def test_class_comes_first_then_slack_to_the_target() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(
        make_spec("batch", service_class=BATCH),
        make_spec("late", service_class=STANDARD, ttft_s=9.0),
        make_spec("soon", service_class=STANDARD, ttft_s=1.0),
        make_spec("now", service_class=INTERACTIVE),
    )
    driver.run()
    assert admission_order(driver) == ["now", "soon", "late", "batch"]


def test_equals_are_served_in_order_of_arrival() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(*(make_spec(f"r{i}") for i in range(20)))
    driver.run()
    assert admission_order(driver) == [f"r{i}" for i in range(20)]


def test_ageing_lets_a_low_class_overtake() -> None:
    assert due_time_s(0.0, None, 2, ageing_s=10.0) > due_time_s(19.0, 1.0, 0, ageing_s=10.0)
    assert due_time_s(0.0, None, 2, ageing_s=10.0) < due_time_s(31.0, 1.0, 0, ageing_s=10.0)


def blocked_head(**changes: Any) -> Driver:
    """A head that needs nearly the whole pool, one long request that holds a part of it, small ones behind."""
    driver = Driver(make_config(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=64, **changes))
    driver.add(make_spec("runs", 4, 24))
    driver.step()
    driver.add(make_spec("head", 55, 4), *(make_spec(f"small{i}", 3, 2) for i in range(40)))
    return driver


def test_hazard_queue_head_strands_all_behind_it() -> None:
    driver = blocked_head(max_bypasses=5)
    assert "small0" in {row.request_id for row in driver.step().rows}


def test_a_blocked_head_is_bypassed_a_bounded_number_of_times() -> None:
    driver = blocked_head(max_bypasses=5)
    driver.run()
    order = admission_order(driver)
    assert order.index("head") == 1 + 5
    assert all(driver.has_ended(f"small{i}") for i in range(40))


def test_control_strict_order_strands_all_behind_the_head() -> None:
    driver = blocked_head(max_bypasses=0)
    driver.run()
    assert admission_order(driver).index("head") == 1


def test_control_without_the_bound_the_head_starves() -> None:
    driver = blocked_head(max_bypasses=1_000_000)
    driver.run()
    assert admission_order(driver).index("head") > 20


def test_hazard_running_zero_waiting_many_health_green() -> None:
    """The watchdog's values name who blocks and why; whenever work is left, a step is planned."""
    driver = blocked_head(max_bypasses=0)
    driver.step()
    driver.step()
    blocked = driver.scheduler.stats().blocked
    assert blocked is not None
    assert (blocked.request_id, blocked.reason) == ("head", "blocks")
    assert blocked.needed_blocks > blocked.available_blocks
    assert blocked.waited_s > 0.0
    driver.run()
    assert driver.scheduler.stats().blocked is None


def test_the_watermark_does_not_lock_out_a_request_that_fills_the_pool() -> None:
    driver = Driver(make_config(num_blocks=16, watermark_blocks=8))
    driver.add(make_spec("full", 60, 4), make_spec("next", 60, 4))
    driver.run()
    assert driver.finish_of("full") is driver.finish_of("next") is FinishReason.LENGTH


def test_admission_leaves_the_watermark_free() -> None:
    driver = Driver(make_config(num_blocks=16, watermark_blocks=6))
    driver.add(*(make_spec(f"r{i}", 16, 4) for i in range(4)))
    driver.step()
    stats = driver.scheduler.stats()
    assert stats.num_running == 2
    assert stats.free_blocks + stats.cached_blocks >= 6


def test_static_admits_a_group_and_nobody_until_all_of_it_ended() -> None:
    driver = Driver(make_config(policy=Policy.STATIC, max_num_batched_tokens=8))
    driver.add(*(make_spec(f"r{i}", 6, 2 + 3 * (i % 4)) for i in range(9)))
    groups: list[set[str]] = []
    while (plan := driver.plan()) is not None:
        running = driver.scheduler.stats().num_running
        if not groups or all(driver.has_ended(name) for name in groups[-1]):
            assert running == min(4, 9 - 4 * len(groups))
            groups.append({f"r{i}" for i in range(4 * len(groups), 4 * len(groups) + running)})
        assert {row.request_id for row in plan.rows} <= groups[-1]
        driver.complete(plan)
    assert len(groups) == 3
    assert driver.is_empty()


def test_static_names_the_group_as_the_reason() -> None:
    driver = Driver(make_config(policy=Policy.STATIC, max_num_seqs=1))
    driver.add(make_spec("a"), make_spec("b"))
    driver.step()
    driver.step()
    blocked = driver.scheduler.stats().blocked
    assert blocked is not None
    assert (blocked.request_id, blocked.reason) == ("b", "group")


def test_queue_keeps_order_and_backlog() -> None:
    config = make_config()
    queue = WaitingQueue()
    requests = [Request.of(make_spec(f"r{i}", 1 + i, ttft_s=float(-i)), i, config) for i in range(5)]
    for request in requests:
        queue.push(request)
    assert queue.peek(2) == [requests[4], requests[3]]
    assert queue.num_tokens == 15
    queue.remove(requests[3])
    assert queue.peek(9) == [requests[i] for i in (4, 2, 1, 0)]
    assert queue.num_tokens == 11


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    config = make_config()
    deadlines = Deadlines()
    for i in range(10_000):
        request = Request.of(make_spec("a", 4), i, config)
        deadlines.push(1e9, request, num_live=10)
        request.status = RequestStatus.FINISHED
    assert len(deadlines) < 200


def test_credit_is_given_for_what_can_be_served_soon() -> None:
    driver = Driver(make_config(max_num_seqs=4))
    assert driver.scheduler.credit().requests == 8
    driver.add(*(make_spec(f"r{i}", 4, 20) for i in range(8)))
    driver.step()
    assert driver.scheduler.credit().requests == 0
    while not driver.has_ended("r0"):
        driver.step()
    driver.step()
    assert driver.scheduler.credit().requests == 4
    driver.run()
    assert driver.scheduler.credit().requests == 8


def test_credit_ends_when_the_prefill_backlog_fills_the_horizon() -> None:
    driver = Driver(make_config(num_blocks=4096, max_model_len=4096, max_num_seqs=32))
    driver.add(make_spec("a", 1000, 4))
    assert driver.scheduler.credit().requests == 0
    driver.run()
    assert driver.scheduler.credit().requests > 0


@pytest.mark.parametrize("prompt", [10, 200])
def test_an_idle_scheduler_always_takes_one_request(prompt: int) -> None:
    driver = Driver(make_config(max_num_batched_tokens=4))
    assert driver.scheduler.credit().requests >= 1
    driver.add(make_spec("a", prompt, 4))
    driver.run()
    assert driver.scheduler.credit().requests >= 1
