"""With look-ahead a choice may have taken over a prompt from a row that turns out to have failed: it never counts."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler.forks import Forks
from scheduler.plan import StepPlan
from scheduler.scheduler_config import SchedulerConfig
from scheduler.spec import FinishReason, RequestSpec
from tests.scheduler.driving import Driver, RaisingModel, make_config, make_spec, undisturbed_output

PROMPT = tuple(range(9))
CANCELLED, ERROR, LENGTH = FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.LENGTH


def raising_driver(**changes: Any) -> Driver:
    """Its pool is full of what somebody else has left there."""
    config: SchedulerConfig = make_config(num_lookahead_steps=1, watermark_blocks=0, **changes)
    driver = Driver(config)
    driver.model = RaisingModel(config)
    driver.add(make_spec("old", config.pool_tokens - 2, 1, tenant="other"))
    driver.run()
    return driver


def choice(number: int, num_known: int = 0) -> RequestSpec:
    known = undisturbed_output(PROMPT, num_known)
    return make_spec(f"c{number}", PROMPT, 6, fork_group="job", generated_token_ids=known)


def plan_two(driver: Driver) -> tuple[StepPlan, StepPlan]:
    first, second = driver.plan(), driver.plan()
    assert first is not None
    assert second is not None
    return first, second


def assert_prompt_is_computed_anew(driver: Driver) -> None:
    """By whoever asks for it next, because nothing broken can be found."""
    driver.run()
    driver.add(make_spec("later", PROMPT, 6))
    driver.run()
    assert driver.end("later").num_cached_tokens == 0
    assert driver.output("later") == undisturbed_output(PROMPT, 6)
    assert driver.is_empty()


def run_with_a_prompt_that_was_never_written(*, is_cancelled: bool = False) -> Driver:
    driver = raising_driver(num_blocks=8)
    driver.add(choice(0), choice(1))
    first, second = plan_two(driver)
    assert [(row.request_id, row.num_computed_tokens) for row in second.rows] == [("c0", 9), ("c1", 8)]
    if is_cancelled:
        driver.scheduler.finish("c0", CANCELLED, driver.now_s)
    driver.complete(first, failing={"c0"})
    driver.complete(second, failing={"c0"})
    return driver


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_hazard_a_fork_of_a_failed_row_publishes_a_prompt_that_was_never_written(is_cancelled: bool) -> None:
    driver = run_with_a_prompt_that_was_never_written(is_cancelled=is_cancelled)
    assert driver.finish_of("c0") is (CANCELLED if is_cancelled else ERROR)
    assert (driver.finish_of("c1"), driver.output("c1")) == (ERROR, ())
    assert "the prompt that this choice shares" in (driver.end("c1").error or "")
    assert_prompt_is_computed_anew(driver)


def test_control_a_fork_that_goes_on_makes_the_prompt_findable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forks, "borrowed", lambda self, fork, lender, num_tokens: None)
    driver = run_with_a_prompt_that_was_never_written()
    driver.run()
    assert driver.output("c1")[0] != undisturbed_output(PROMPT, 1)[0]


def test_a_fork_at_second_hand_ends_too() -> None:
    """c1 came first and needs no copy, so c2 takes the prompt over from it in the plan that it took it over in."""
    whole = undisturbed_output(PROMPT[:8], 3)
    driver = raising_driver(num_blocks=12, max_num_seqs=3)
    for name, known, arrival_s in (("c1", 3, 1.0), ("c0", 0, 0.0), ("c2", 3, 2.0)):
        spec = make_spec(name, PROMPT[:8], 6, fork_group="job", arrival_s=arrival_s)
        driver.add(replace(spec, generated_token_ids=whole[:known]))
    first, second = plan_two(driver)
    assert {row.request_id: row.num_computed_tokens for row in second.rows} == {"c0": 8, "c1": 8, "c2": 8}
    driver.complete(first, failing={"c0"})
    driver.complete(second, failing={"c0"})
    assert [driver.finish_of(f"c{i}") for i in range(3)] == [ERROR] * 3
    assert driver.is_empty()


def test_choices_whose_prompt_was_there_before_the_failure_go_on() -> None:
    driver = raising_driver(num_blocks=32)
    driver.add(choice(0), choice(1), choice(2))
    for _ in range(2):
        driver.step()
    driver.step(failing={"c0"})
    assert driver.finish_of("c0") is ERROR
    driver.run()
    assert [driver.finish_of(name) for name in ("c1", "c2")] == [LENGTH, LENGTH]
    assert [driver.output(name) for name in ("c1", "c2")] == [undisturbed_output(PROMPT, 6)] * 2
    assert_prompt_is_computed_anew(driver)


@pytest.mark.parametrize(("num_known", "finish"), [(0, LENGTH), (1, ERROR)])
def test_a_failed_row_takes_along_who_took_over_what_it_computes_and_nobody_else(
    num_known: int, finish: FinishReason
) -> None:
    """c1's first row computes the last prompt token again. c2 computes that itself, unless it is resumed."""
    driver = raising_driver(num_blocks=32)
    driver.add(choice(0), choice(1))
    first, second = plan_two(driver)
    driver.complete(first)
    driver.scheduler.finish("c0", CANCELLED, driver.now_s)
    driver.add(choice(2, num_known))
    third = driver.plan()
    assert third is not None
    assert {row.request_id: row.num_computed_tokens for row in third.rows} == {"c1": 9, "c2": 8 + num_known}
    driver.complete(second, failing={"c1"})
    driver.run()
    assert (driver.finish_of("c1"), driver.finish_of("c2")) == (ERROR, finish)
    if finish is LENGTH:
        assert driver.output("c2") == undisturbed_output(PROMPT, 6)
    assert driver.is_empty()


def test_a_distrusted_choice_publishes_nothing_more() -> None:
    driver = Driver(make_config(num_lookahead_steps=1))
    driver.add(*(make_spec(f"c{i}", PROMPT, 20, fork_group="job") for i in range(2)))
    for _ in range(3):
        driver.step()
    driver.step(failing={"c0"})
    driver.run()
    assert driver.output("c1") == undisturbed_output(PROMPT, 20)
    assert driver.scheduler.stats().cached_blocks == 0
