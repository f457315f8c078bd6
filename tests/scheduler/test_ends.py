"""What ends a request, and what a row that was planned behind its end can do to others: nothing."""

import pytest

from scheduler.plan import SamplingParams
from scheduler.spec import FinishReason
from tests.scheduler.driving import STOP, Driver, make_config, make_spec, undisturbed_output

PROMPT = tuple(range(9))
STOPS = frozenset((STOP,))


@pytest.mark.parametrize("num_lookahead_steps", [0, 1])
@pytest.mark.parametrize(
    ("grammar", "num_output", "finish"),
    [("yes|no", 3, FinishReason.STOP), (None, 8, FinishReason.LENGTH)],
)
def test_with_a_grammar_a_stop_id_ends_a_request_before_min_tokens(
    grammar: str | None, num_output: int, finish: FinishReason, num_lookahead_steps: int
) -> None:
    """The sampler lets it through where nothing else may follow, so there is nothing to go on with."""
    driver = Driver(make_config(num_lookahead_steps=num_lookahead_steps))
    sampling = SamplingParams(seed=0, grammar=grammar, min_tokens=6, banned_token_ids=(STOP,))
    driver.add(make_spec("a", PROMPT, 8, sampling=sampling, stop_token_ids=STOPS))
    driver.model.stop_after["a"] = 3
    driver.run()
    assert len(driver.output("a")) == num_output
    assert driver.finish_of("a") is finish


def test_a_resumed_request_that_a_grammar_had_ended_ends_at_once_and_an_empty_one_does_not() -> None:
    driver = Driver()
    sampling = SamplingParams(seed=0, grammar="yes|no", min_tokens=6)
    for name, known in (("ended", (5, STOP)), ("empty", ())):
        spec = make_spec(name, PROMPT, 8, sampling=sampling, stop_token_ids=STOPS, generated_token_ids=known)
        driver.add(spec)
    driver.collect()
    assert driver.finish_of("ended") is FinishReason.STOP
    assert not driver.has_ended("empty")
    driver.run()


def ended_with_a_row_out(*, is_stopped_outside: bool = False) -> Driver:
    """Two choices; then c0 has ended while its next row is out, which is going to fail."""
    driver = Driver(make_config(num_lookahead_steps=1, max_num_seqs=2))
    driver.add(*(make_spec(f"c{i}", PROMPT, 12, fork_group="job", stop_token_ids=STOPS) for i in range(3)))
    if not is_stopped_outside:
        driver.model.stop_after["c0"] = 3
    for _ in range(3):
        driver.step()
    if is_stopped_outside:
        driver.scheduler.finish("c0", FinishReason.STOP, driver.now_s)
        driver.collect()
    assert driver.finish_of("c0") is FinishReason.STOP
    [late] = [row for plan in driver.in_flight for row in plan.rows if row.request_id == "c0"]
    assert late.is_pending
    return driver


@pytest.mark.parametrize("is_stopped_outside", [False, True])
def test_hazard_a_failed_row_behind_an_end_empties_the_prefix_cache(is_stopped_outside: bool) -> None:
    driver = ended_with_a_row_out(is_stopped_outside=is_stopped_outside)
    driver.step(failing={"c0"})
    driver.step()
    forked = next(row for row in driver.plans[-1].rows if row.request_id == "c2")
    assert forked.num_computed_tokens == 8, "c1 goes on lending the prompt"
    driver.run()
    assert driver.output("c2") == undisturbed_output(PROMPT, 12)
    driver.add(make_spec("later", PROMPT, 6))
    driver.run()
    assert driver.end("later").num_cached_tokens == 8
    assert driver.output("later") == undisturbed_output(PROMPT, 6)


def test_the_block_that_a_failed_row_behind_an_end_was_to_fill_cannot_be_found() -> None:
    driver = Driver(make_config(num_lookahead_steps=1))
    driver.add(make_spec("a", PROMPT[:6], 8, stop_token_ids=STOPS))
    driver.model.stop_after["a"] = 2
    driver.step()
    driver.step(failing=())
    late = driver.in_flight[0].rows[0]
    assert (late.request_id, late.sample_position) == ("a", 8), "it fills the second block"
    driver.step(failing={"a"})
    assert driver.scheduler.stats().cached_blocks == 1


def test_a_prompt_whose_row_fails_after_an_end_from_outside_is_not_found_either() -> None:
    """STOP, but no token had been sampled: what the chunks before left may be what broke this one."""
    driver = Driver(make_config(num_lookahead_steps=1, max_num_batched_tokens=4))
    driver.add(make_spec("a", PROMPT, 8))
    driver.step()
    driver.plan_ahead()
    driver.scheduler.finish("a", FinishReason.STOP, driver.now_s)
    driver.step(failing={"a"})
    driver.run()
    assert driver.scheduler.stats().cached_blocks == 0
