"""`finish` in every state: at once, once, and without a trace."""

import pytest

from scheduler.spec import FinishReason
from tests.scheduler.driving import Driver, make_config, make_spec, undisturbed_output

CANCELLED = FinishReason.CANCELLED


def reach(state: str) -> Driver:
    """A driver in which request 'x' is in that state, with neighbours in others."""
    driver = Driver(make_config(num_blocks=12, max_num_seqs=2, max_num_batched_tokens=8))
    x = make_spec("x", 20, 8)
    if state == "waiting":
        driver.add(make_spec("a", 4, 8), make_spec("b", 4, 8), x)
        driver.step()
    elif state == "prefill":
        driver.add(make_spec("a", 4, 8), x)
        driver.step()
        driver.step()
    elif state == "decode":
        driver.add(make_spec("a", 4, 16), x)
        while not driver.output("x"):
            driver.step()
    else:
        driver.add(make_spec("a", 8, 30), make_spec("x", 20, 24))
        while not driver.scheduler.stats().num_preempted:
            driver.step()
    return driver


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted"])
def test_cancel_in_every_state_frees_all_and_reports_once(state: str) -> None:
    driver = reach(state)
    held = driver.scheduler.stats().held_blocks
    assert driver.scheduler.finish("x", CANCELLED, driver.now_s)
    assert not driver.scheduler.finish("x", CANCELLED, driver.now_s)
    driver.collect()
    assert driver.finish_of("x") is CANCELLED
    if state in ("prefill", "decode"):
        assert driver.scheduler.stats().held_blocks < held
    driver.scheduler.pool.check()
    steps_after = len(driver.plans)
    driver.run()
    assert all(row.request_id != "x" for plan in driver.plans[steps_after:] for row in plan.rows)
    assert len(driver.output("a")) in (8, 16, 30)
    assert driver.is_empty()


@pytest.mark.parametrize("state", ["prefill", "decode"])
def test_hazard_cancel_during_the_step_frees_blocks_still_being_written(state: str) -> None:
    driver = reach(state)
    before = len(driver.output("x"))
    plan = driver.plan()
    assert plan is not None
    held, slots = driver.scheduler.stats().held_blocks, driver.scheduler.stats().num_running
    assert driver.scheduler.finish("x", CANCELLED, driver.now_s)
    driver.collect()
    assert driver.finish_of("x") is CANCELLED, "reported at once, not when the step returns"
    stats = driver.scheduler.stats()
    assert (stats.held_blocks, stats.num_leaving, stats.num_running) == (held, 1, slots - 1)
    driver.complete(plan)
    stats = driver.scheduler.stats()
    assert stats.held_blocks < held
    assert stats.num_leaving == 0
    assert len(driver.output("x")) == before, "the row's result is discarded"
    driver.run()
    assert driver.is_empty()


def test_an_id_may_come_again_while_its_cancelled_step_still_runs() -> None:
    driver = Driver()
    driver.add(make_spec("x", 6, 8))
    driver.step()
    plan = driver.plan()
    assert plan is not None
    driver.scheduler.finish("x", CANCELLED, driver.now_s)
    driver.add(make_spec("x", 6, 3))
    driver.complete(plan)
    driver.run()
    ends = [update.finish for update in driver.updates if update.finish]
    assert ends == [CANCELLED, FinishReason.LENGTH]
    assert driver.output("x")[1:] == undisturbed_output(make_spec("x", 6).prompt_token_ids, 3)


def test_hazard_cancelling_a_queued_request_kills_another_s_decode() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    driver.add(*(make_spec(name, 5, 12) for name in "abcde"))
    driver.step()
    plan = driver.plan()
    assert plan is not None
    for name in "cd":
        driver.scheduler.finish(name, CANCELLED, driver.now_s)
    driver.complete(plan)
    driver.run()
    for name in "abe":
        assert driver.output(name) == undisturbed_output(make_spec(name, 5).prompt_token_ids, 12)
        assert driver.finish_of(name) is FinishReason.LENGTH


def test_hazard_client_gone_request_decodes_to_max_tokens() -> None:
    driver = Driver()
    driver.add(make_spec("x", 4, 200))
    for _ in range(3):
        driver.step()
    driver.scheduler.finish("x", CANCELLED, driver.now_s)
    assert driver.plan() is None
    assert len(driver.plans) == 3


def test_hazard_cancelled_requests_leak_blocks_until_the_pool_is_gone() -> None:
    driver = Driver(make_config(num_blocks=12))
    for i in range(300):
        driver.add(make_spec(f"r{i}", 10, 8))
        plan = driver.plan() if i % 3 else None
        driver.scheduler.finish(f"r{i}", CANCELLED, driver.now_s)
        if plan is not None:
            driver.complete(plan)
        driver.collect()
        stats = driver.scheduler.stats()
        assert stats.held_blocks == 0
        assert stats.free_blocks + stats.cached_blocks == 12
    assert sum(update.finish is CANCELLED for update in driver.updates) == 300


def test_a_stop_string_ends_the_request_with_the_reason_given() -> None:
    driver = Driver()
    driver.add(make_spec("x", 4, 20))
    driver.step()
    assert driver.scheduler.finish("x", FinishReason.STOP, driver.now_s)
    driver.collect()
    assert driver.finish_of("x") is FinishReason.STOP
    assert driver.end("x").new_token_ids == ()


def test_tokens_not_yet_taken_come_with_the_end() -> None:
    driver = Driver()
    driver.add(make_spec("x", 4, 20))
    plan = driver.plan()
    assert plan is not None
    driver.scheduler.update(driver.model.run(plan), 0.1)
    driver.scheduler.finish("x", FinishReason.ERROR, 0.1, error="the job's own fault")
    [update] = driver.scheduler.take_updates()
    assert (len(update.new_token_ids), update.finish, update.error) == (
        1,
        FinishReason.ERROR,
        "the job's own fault",
    )


def test_finishing_an_unknown_request_is_no_error() -> None:
    driver = Driver()
    assert not driver.scheduler.finish("nobody", CANCELLED, 0.0)
    driver.add(make_spec("x", 4, 1))
    driver.run()
    assert not driver.scheduler.finish("x", CANCELLED, driver.now_s)
    assert driver.finish_of("x") is FinishReason.LENGTH


def test_error_of_a_cancelled_row_is_discarded_and_its_blocks_forgotten() -> None:
    driver = Driver()
    driver.add(make_spec("x", range(10), 20))
    driver.step()
    plan = driver.plan()
    assert plan is not None
    driver.scheduler.finish("x", CANCELLED, driver.now_s)
    driver.complete(plan, failing={"x"})
    assert driver.finish_of("x") is CANCELLED
    assert driver.scheduler.stats().cached_blocks == 0
