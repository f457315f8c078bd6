"""What `add` refuses, and what it ends at once."""

from typing import Any

import pytest

from scheduler.plan import SamplingParams
from scheduler.spec import FinishReason
from tests.scheduler.driving import STOP, Driver, make_config, make_spec, undisturbed_output
from tests.support.configs import scheduler_config


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "value", "limit"),
    [
        (0, 4, "prompt", 0, 1),
        (4, 0, "max_tokens", 0, 1),
        (4, -7, "max_tokens", -7, 1),
        (250, 7, "prompt + max_tokens", 257, 256),
        (4, 1 << 60, "prompt + max_tokens", (1 << 60) + 4, 256),
    ],
)
def test_a_rejection_names_field_value_and_limit(
    prompt: int, max_tokens: int, field: str, value: int, limit: int
) -> None:
    rejection = Driver().scheduler.add(make_spec("a", prompt, max_tokens), 0.0)
    assert rejection is not None
    assert (rejection.field, rejection.value, rejection.limit) == (field, value, limit)
    assert str(value) in rejection.message
    assert str(limit) in rejection.message


def test_hazard_request_larger_than_the_pool_waits_at_the_head_for_ever() -> None:
    driver = Driver(make_config(num_blocks=8))
    rejection = driver.scheduler.add(make_spec("big", 30, 3), 0.0)
    assert rejection is not None
    assert (rejection.field, rejection.value, rejection.limit) == ("prompt + max_tokens", 33, 32)
    driver.add(make_spec("fits", 29, 3))
    driver.run()
    assert driver.finish_of("fits") is FinishReason.LENGTH


def test_hazard_one_request_that_cannot_fit_fails_all_requests() -> None:
    driver = Driver(make_config(num_blocks=8))
    driver.add(make_spec("a", 8, 8))
    driver.step()
    assert driver.scheduler.add(make_spec("big", 100, 100), driver.now_s) is not None
    driver.add(make_spec("b", 8, 8))
    driver.run()
    assert len(driver.output("a")) == len(driver.output("b")) == 8


def test_a_duplicate_id_is_rejected_until_the_first_has_ended() -> None:
    driver = Driver()
    driver.add(make_spec("a", 4, 2))
    for _ in range(2):
        rejection = driver.scheduler.add(make_spec("a", 4, 2), 0.0)
        assert rejection is not None
        assert (rejection.field, rejection.value) == ("request_id", "a")
        driver.step()
    driver.add(make_spec("a", 4, 2))
    driver.run()
    assert len(driver.output("a")) == 4


def test_hazard_cap_counted_too_late_a_full_queue_refuses_at_intake() -> None:
    driver = Driver(make_config(max_waiting=2))
    driver.add(make_spec("a"), make_spec("b"))
    rejection = driver.scheduler.add(make_spec("c"), 0.0)
    assert rejection is not None
    assert (rejection.field, rejection.value, rejection.limit) == ("waiting", 2, 2)
    driver.run()
    assert not driver.has_ended("c")


def test_a_deadline_already_past_ends_expired_without_computing() -> None:
    driver = Driver()
    driver.now_s = 5.0
    driver.add(make_spec("late", deadline_s=5.0))
    assert driver.plan() is None
    driver.collect()
    assert driver.finish_of("late") is FinishReason.EXPIRED
    assert not driver.scheduler.has_work


def test_a_deadline_that_passes_while_waiting_or_running_ends_expired() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(make_spec("runs", 4, 100, deadline_s=0.2), make_spec("waits", 4, 100, deadline_s=0.1))
    driver.run()
    assert driver.finish_of("runs") is FinishReason.EXPIRED
    assert 0 < len(driver.output("runs")) < 100
    assert driver.finish_of("waits") is FinishReason.EXPIRED
    assert driver.output("waits") == ()
    assert driver.is_empty()


@pytest.mark.parametrize(
    ("generated", "min_tokens", "reason"),
    [
        ((7, 7, 7), 0, FinishReason.LENGTH),
        ((7, 7, 7, 7, 7), 0, FinishReason.LENGTH),
        ((7, STOP), 0, FinishReason.STOP),
        ((7, 7, STOP), 0, FinishReason.STOP),
    ],
)
def test_resumed_output_that_is_complete_ends_without_computing(
    generated: tuple[int, ...], min_tokens: int, reason: FinishReason
) -> None:
    driver = Driver()
    sampling = SamplingParams(seed=0, min_tokens=min_tokens)
    spec = make_spec(
        "a", 4, 3, generated_token_ids=generated, stop_token_ids=frozenset((STOP,)), sampling=sampling
    )
    driver.add(spec)
    assert driver.plan() is None
    driver.collect()
    assert driver.finish_of("a") is reason
    assert driver.output("a") == ()


def test_a_complete_resumed_request_needs_no_room_in_the_queue() -> None:
    driver = Driver(make_config(max_waiting=1))
    driver.add(make_spec("a"), make_spec("done", 4, 2, generated_token_ids=(5, 6)))
    driver.collect()
    assert driver.finish_of("done") is FinishReason.LENGTH


def test_resumed_tokens_are_recomputed_counted_and_not_reported_again() -> None:
    prompt = tuple(range(50, 57))
    whole = undisturbed_output(prompt, 10)
    driver = Driver()
    driver.add(make_spec("a", prompt, 10, generated_token_ids=whole[:6]))
    plan = driver.step()
    assert plan.rows[0].token_ids == prompt + whole[:6]
    assert plan.rows[0].num_generated_tokens == 6
    assert plan.rows[0].sample_position == 13
    driver.run()
    assert driver.output("a") == whole[6:]
    assert driver.finish_of("a") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0: must be at least 1"),
        ({"watermark_blocks": 64}, "watermark_blocks is 64: must be 0 to 63"),
        ({"max_bypasses": -1}, "max_bypasses is -1: must be at least 0"),
        ({"ageing_s": 0.0}, "ageing_s is 0.0"),
    ],
)
def test_a_config_that_cannot_work_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**changes)


def test_the_smallest_config_works() -> None:
    driver = Driver(
        scheduler_config(
            num_blocks=1, block_size=2, max_num_seqs=1, max_model_len=2, max_num_batched_tokens=1
        )
    )
    driver.add(make_spec("a", 1, 1), make_spec("b", 1, 1))
    driver.run()
    assert len(driver.output("a")) == len(driver.output("b")) == 1
