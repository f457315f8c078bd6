"""The next step planned while one is in flight: what each request produces stays the same, only the timing differs."""

import random
from dataclasses import replace
from typing import Any

import pytest

from scheduler.plan import PENDING_TOKEN, SamplingParams
from scheduler.request import Request
from scheduler.scheduler_config import ClassTargets, Policy, SchedulerConfig
from scheduler.spec import FinishReason, RequestSpec, ServiceClass
from scheduler.virtual import VirtualRequest, run_virtual
from tests.scheduler.controls import frees_blocks_still_being_written
from tests.scheduler.driving import STOP, Driver, make_config, make_spec, ready_model, undisturbed_output


def ahead(**changes: Any) -> Driver:
    return Driver(make_config(num_lookahead_steps=1, **changes))


def random_specs(rng: random.Random) -> list[RequestSpec]:
    specs = []
    for i in range(14):
        sampling = SamplingParams(
            seed=0,
            repetition_penalty=1.0 + i % 2,
            num_logprobs=i % 3 or None,
            min_tokens=rng.choice([0, 0, 6]),
        )
        stem = range(rng.randrange(3), 50)
        spec = make_spec(f"r{i}", stem[: rng.randint(1, 24)], rng.randint(1, 20), sampling=sampling)
        ids = frozenset((STOP,)) if i % 4 else frozenset[int]()
        resumed = undisturbed_output(spec.prompt_token_ids, rng.choice([0, 0, 1]))
        service_class = rng.choice(list(ServiceClass))
        specs.append(
            replace(spec, stop_token_ids=ids, generated_token_ids=resumed, service_class=service_class)
        )
    return specs


def play(config: SchedulerConfig, seed: int, *, is_measured: bool) -> Driver:
    """Requests that come in between steps."""
    rng = random.Random(seed)
    driver = Driver(config, ready_model() if is_measured else None)
    for i, spec in enumerate(random_specs(rng)):
        if i % 4 == 0:
            driver.model.stop_after[spec.request_id] = rng.randint(1, 12)
        driver.add(spec)
        if i % 3 == 0:
            driver.plan_ahead()
            if driver.in_flight:
                driver.complete(driver.in_flight[0])
    driver.run()
    assert driver.is_empty()
    return driver


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("seed", range(12))
def test_each_request_gets_the_same_tokens_and_end_with_and_without(seed: int, policy: Policy) -> None:
    config = make_config(
        num_blocks=14, max_num_seqs=5, policy=policy, prefix_caching=seed % 2 == 0, watermark_blocks=0
    )
    plain = play(config, seed, is_measured=seed % 3 == 0)
    lookahead = play(replace(config, num_lookahead_steps=1), seed, is_measured=seed % 3 == 0)
    for i in range(14):
        name = f"r{i}"
        assert lookahead.output(name) == plain.output(name)
        assert lookahead.finish_of(name) == plain.finish_of(name)
        ours, theirs = (driver.end(name).logprobs for driver in (lookahead, plain))
        assert len(ours) == len(theirs)
    assert any(row.is_pending for plan in lookahead.plans for row in plan.rows)


def test_a_decoding_row_is_planned_before_its_token_is_known() -> None:
    driver = ahead()
    driver.add(make_spec("a", 4, 3))
    driver.plan_ahead()
    first, second = (plan.rows[0] for plan in driver.in_flight)
    assert (second.token_ids, second.num_computed_tokens) == ((PENDING_TOKEN,), first.sample_position)
    assert (first.num_generated_tokens, second.num_generated_tokens) == (0, 1)
    assert len(second.block_table) == 2, "room for the token that is not known yet"


def test_at_most_two_steps_are_out() -> None:
    driver = ahead()
    driver.add(make_spec("a", 4, 8))
    driver.plan_ahead()
    with pytest.raises(AssertionError, match=r"before update\(\): 2 plans are in flight, at most 1 may be"):
        driver.scheduler.schedule(0.0)


def run_lengths_ahead() -> list[int]:
    """Rows planned for requests of 1, 2, … output tokens."""
    driver = ahead()
    driver.add(*(make_spec(f"r{n}", 3 + n, n) for n in range(1, 9)))
    driver.run()
    for n in range(1, 9):
        assert len(driver.output(f"r{n}")) == n
    return [sum(row.request_id == f"r{n}" for plan in driver.plans for row in plan.rows) for n in range(1, 9)]


def test_hazard_async_scheduling_runs_past_max_tokens() -> None:
    assert run_lengths_ahead() == list(range(1, 9))


def test_control_without_counting_the_pending_token_it_runs_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "can_decode", property(lambda self: self.num_missing_tokens == 1))
    assert run_lengths_ahead() == list(range(2, 10))


def stopped_with_a_step_out() -> Driver:
    """`a` turned out to have ended while the next row of it was out."""
    driver = ahead(num_blocks=4)
    driver.add(make_spec("a", 4, 8, stop_token_ids=frozenset((STOP,))))
    driver.model.stop_after["a"] = 2
    driver.step()
    driver.step()
    assert driver.finish_of("a") is FinishReason.STOP
    assert [row.request_id for plan in driver.in_flight for row in plan.rows] == ["a"]
    return driver


def test_hazard_async_scheduling_frees_blocks_still_being_written() -> None:
    driver = stopped_with_a_step_out()
    stats = driver.scheduler.stats()
    assert (stats.held_blocks, stats.num_leaving, stats.num_running) == (2, 1, 0)
    driver.add(make_spec("b", 12, 2))
    assert driver.plan() is None, "the blocks that `a` still writes are the ones that `b` needs"
    driver.complete(driver.in_flight[0])
    assert len(driver.output("a")) == 2, "the row behind the end does not count"
    driver.run()
    assert driver.output("b") == undisturbed_output(make_spec("b", 12, 2).prompt_token_ids, 2)
    assert driver.is_empty()


def test_control_blocks_freed_at_the_end_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    frees_blocks_still_being_written(monkeypatch)
    with pytest.raises(AssertionError, match="blocks still being written are free"):
        stopped_with_a_step_out()


PROMPT = tuple(range(9))


def run_with_a_block_filled_by_a_broken_row() -> Driver:
    """`a` fills a block in each step, and the second step breaks it; `b` has the same prompt and is planned before."""
    driver = ahead(max_num_batched_tokens=4)
    driver.add(make_spec("a", PROMPT, 8))
    driver.step()
    driver.add(make_spec("b", PROMPT, 4))
    driver.step(failing={"a"})
    driver.run()
    return driver


def test_a_block_is_published_when_the_step_that_filled_it_has_returned() -> None:
    driver = run_with_a_block_filled_by_a_broken_row()
    assert driver.finish_of("a") is FinishReason.ERROR
    assert driver.end("b").num_cached_tokens == 4, "the block that was filled before, and no other"
    assert driver.output("b") == undisturbed_output(PROMPT, 4)


def test_control_a_block_published_before_that_is_read_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = property(lambda self: self.num_computed_tokens, lambda self, value: None)
    monkeypatch.setattr(Request, "num_settled_tokens", computed)
    driver = run_with_a_block_filled_by_a_broken_row()
    assert driver.end("b").num_cached_tokens == 8
    assert driver.output("b") != undisturbed_output(PROMPT, 4)


def test_a_request_preempted_while_a_step_of_it_is_out_keeps_that_steps_token() -> None:
    driver = ahead(num_blocks=6, max_num_seqs=2, watermark_blocks=0)
    driver.add(make_spec("a", 7, 16), make_spec("b", 7, 16))
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    for name in "ab":
        assert driver.output(name) == undisturbed_output(make_spec(name, 7).prompt_token_ids, 16)
        computed = [row for plan in driver.plans for row in plan.rows if row.request_id == name]
        sampled = [row.num_generated_tokens for row in computed if row.sampling is not None]
        assert sampled == list(range(16)), "no token is sampled twice"


def test_a_higher_class_gets_the_slot_one_step_later_and_nothing_is_lost() -> None:
    driver = ahead(max_num_seqs=1)
    driver.add(make_spec("low", 4, 12, service_class=ServiceClass.BATCH))
    driver.step()
    driver.add(make_spec("high", 4, 2, service_class=ServiceClass.INTERACTIVE))
    seen = [[row.request_id for row in driver.step().rows] for _ in range(3)]
    assert seen == [["low"], ["high"], ["high"]]
    driver.run()
    assert driver.output("low") == undisturbed_output(make_spec("low", 4).prompt_token_ids, 12)
    assert driver.scheduler.stats().num_preemptions == 1


def test_an_error_while_the_next_row_is_out_ends_the_request_once() -> None:
    driver = ahead()
    driver.add(make_spec("bad", 4, 8), make_spec("good", 4, 8))
    driver.step(failing={"bad"})
    driver.step()
    driver.run()
    assert driver.finish_of("bad") is FinishReason.ERROR
    assert driver.output("bad") == ()
    assert driver.output("good") == undisturbed_output(make_spec("good", 4).prompt_token_ids, 8)


def test_a_row_that_breaks_after_its_request_was_cancelled_leaves_nothing_to_be_found() -> None:
    driver = ahead()
    driver.add(make_spec("a", PROMPT, 8))
    driver.step()
    assert driver.scheduler.finish("a", FinishReason.CANCELLED, driver.now_s)
    driver.plan_ahead()
    assert driver.scheduler.stats().num_leaving == 1
    driver.step(failing={"a"})
    driver.add(make_spec("b", PROMPT, 2))
    driver.run()
    assert driver.end("b").num_cached_tokens == 0


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_a_request_with_two_steps_out_ends_once_and_leaves_when_both_are_back(end: str) -> None:
    driver = ahead()
    driver.add(make_spec("a", 4, 8, deadline_s=0.001 if end == "deadline" else None))
    driver.plan_ahead()
    if end == "cancel":
        driver.scheduler.finish("a", FinishReason.CANCELLED, driver.now_s)
        driver.collect()
    leaving = []
    while driver.in_flight:
        driver.complete(driver.in_flight[0])
        driver.plan()
        leaving.append(driver.scheduler.stats().num_leaving)
    driver.run()
    assert leaving == [1, 0]
    assert driver.finish_of("a") is (FinishReason.EXPIRED if end == "deadline" else FinishReason.CANCELLED)
    assert driver.is_empty()


@pytest.mark.parametrize(("min_tokens", "num_output"), [(0, 2), (4, 8)])
def test_a_stop_id_counts_from_min_tokens_on_with_one_token_pending(min_tokens: int, num_output: int) -> None:
    driver = ahead()
    sampling = SamplingParams(seed=0, min_tokens=min_tokens)
    driver.add(make_spec("a", 4, 8, sampling=sampling, stop_token_ids=frozenset((STOP,))))
    driver.model.stop_after["a"] = 2
    driver.run()
    assert len(driver.output("a")) == num_output


def test_a_static_group_is_formed_when_all_of_the_former_have_left() -> None:
    driver = ahead(max_num_seqs=2, policy=Policy.STATIC)
    driver.add(*(make_spec(name, 4, 9, stop_token_ids=frozenset((STOP,))) for name in "abcd"))
    driver.model.stop_after = {"a": 2, "b": 3, "c": 3, "d": 3}
    driver.run()
    groups = [tuple(sorted({row.request_id for row in plan.rows})) for plan in driver.plans]
    assert [group for i, group in enumerate(groups) if group not in groups[:i]] == [
        ("a", "b"),
        ("b",),
        ("c", "d"),
    ]


def test_the_slot_of_a_request_that_waits_for_its_last_token_is_filled_a_step_later() -> None:
    """In iterations, where nothing is gained by planning ahead: what it costs at each end."""
    config = make_config(max_num_seqs=2, enable_goodput=False)
    requests = [VirtualRequest(f"r{i}", 4, num_tokens) for i, num_tokens in enumerate((3, 10, 3))]
    plain, ahead = (run_virtual(replace(config, num_lookahead_steps=count), requests) for count in (0, 1))
    assert [plain.outcomes[f"r{i}"].finish_s for i in range(3)] == [3.0, 10.0, 6.0]
    assert [ahead.outcomes[f"r{i}"].finish_s for i in range(3)] == [3.0, 10.0, 7.0]
    assert len(plain.iterations) == len(ahead.iterations) == 10


def test_requests_without_target_sit_out_for_a_tight_one_with_a_token_pending_too() -> None:
    targets = {ServiceClass.INTERACTIVE: ClassTargets(tpot_s=0.0181)}
    driver = Driver(
        make_config(num_lookahead_steps=1, max_num_seqs=8, targets=targets, max_num_batched_tokens=64),
        ready_model(),
    )
    driver.add(*(make_spec(f"r{i}", 4, 30, service_class=ServiceClass.BATCH) for i in range(6)))
    driver.step()
    driver.add(make_spec("tight", 4, 30, service_class=ServiceClass.INTERACTIVE))
    driver.run()
    rows = [[row.request_id for row in plan.rows] for plan in driver.plans]
    assert any(len(names) < 7 for names in rows if "tight" in names), "somebody sat out"
    for name in ("tight", *(f"r{i}" for i in range(6))):
        assert driver.output(name) == undisturbed_output(make_spec(name, 4).prompt_token_ids, 30)


def test_only_one_step_may_be_planned_ahead() -> None:
    with pytest.raises(ValueError, match="num_lookahead_steps is 2: must be 0 or 1"):
        make_config(num_lookahead_steps=2)
