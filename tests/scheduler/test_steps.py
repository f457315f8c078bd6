"""How a step is divided, what its rows say, and when a request ends."""

import pytest

from scheduler.blocks import BlockPool
from scheduler.plan import SamplingParams, StepResult
from scheduler.spec import FinishReason
from tests.scheduler.driving import STOP, Driver, make_config, make_spec, undisturbed_output


def test_batching_changes_nobody_s_tokens() -> None:
    driver = Driver()
    prompts = {f"r{i}": tuple(range(10 * i, 10 * i + 3 + 5 * i)) for i in range(7)}
    driver.add(*(make_spec(name, prompt, 6) for name, prompt in prompts.items()))
    driver.run()
    for name, prompt in prompts.items():
        assert driver.output(name) == undisturbed_output(prompt, 6)
    assert driver.is_empty()


def test_decodes_come_first_and_prefill_takes_what_is_left_of_the_budget() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_spec("a", 3, 8), make_spec("b", 20, 2))
    first = driver.step()
    assert [(row.request_id, len(row.token_ids)) for row in first.rows] == [("a", 3), ("b", 5)]
    second = driver.step()
    assert [(row.request_id, len(row.token_ids)) for row in second.rows] == [("a", 1), ("b", 7)]


def test_a_prompt_is_computed_in_chunks_and_only_the_last_one_samples() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_spec("a", 20, 2))
    chunks = [driver.step().rows[0] for _ in range(3)]
    assert [(row.num_computed_tokens, len(row.token_ids)) for row in chunks] == [(0, 8), (8, 8), (16, 4)]
    assert [row.sampling is None for row in chunks] == [True, True, False]
    assert [len(row.block_table) for row in chunks] == [2, 4, 5]
    assert len(driver.output("a")) == 1


def test_a_chunk_of_one_token_goes_with_the_rows_of_one_token() -> None:
    driver = Driver(make_config(max_num_batched_tokens=4))
    driver.add(make_spec("a", 5, 2), make_spec("b", 9, 2))
    driver.run()
    assert len(driver.output("a")) == len(driver.output("b")) == 2


def test_the_chunk_in_hand_is_finished_before_others_are_admitted() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_spec("a", 20, 2), make_spec("b", 4, 2))
    assert [len(driver.step().rows) for _ in range(3)] == [1, 1, 2]


def test_slots_stay_with_their_request_and_are_reported_when_released() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    driver.add(make_spec("a", 4, 2), make_spec("b", 4, 5), make_spec("c", 4, 2))
    slots: dict[str, set[int]] = {}
    released: list[tuple[int, ...]] = []
    while (plan := driver.plan()) is not None:
        released.append(plan.released_slots)
        for row in plan.rows:
            slots.setdefault(row.request_id, set()).add(row.slot)
        driver.complete(plan)
    assert slots == {"a": {0}, "b": {1}, "c": {0}}
    assert released == [(), (), (0,), (), (0,)]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(seed=0, presence_penalty=0.5), SamplingParams(seed=0, frequency_penalty=0.5)]
)
def test_history_is_sent_in_the_first_sampling_row_after_each_admission(sampling: SamplingParams) -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    prompt = tuple(range(10, 22))
    driver.add(make_spec("a", prompt, 4, sampling=sampling, generated_token_ids=(7,)), make_spec("b", 4, 4))
    driver.run()
    rows = [row for plan in driver.plans for row in plan.rows]
    assert [row.history for row in rows if row.request_id == "a"] == [None, (prompt, (7,)), None, None]
    assert all(row.history is None for row in rows if row.request_id == "b")


def test_history_is_sent_again_after_a_preemption() -> None:
    driver = Driver(make_config(num_blocks=6, max_num_seqs=2))
    sampling = SamplingParams(seed=0, repetition_penalty=1.1)
    driver.add(*(make_spec(name, 7, 14, sampling=sampling) for name in "ab"))
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    sent = [
        row.history for plan in driver.plans for row in plan.rows if row.request_id == "b" and row.history
    ]
    assert len(sent) == driver.scheduler.stats().num_preemptions + 1
    generated = driver.output("b")
    assert all(history[1] == generated[: len(history[1])] for history in sent)


def test_hazard_streaming_copies_the_whole_token_list_for_each_token() -> None:
    """A decoding row carries one token, and the same table object until a block is added."""
    driver = Driver(make_config(max_model_len=256))
    driver.add(make_spec("a", 4, 200))
    driver.step()
    tables = [driver.step().rows[0].block_table for _ in range(100)]
    assert all(len(plan.rows[0].token_ids) == 1 for plan in driver.plans[1:])
    assert len({id(table) for table in tables}) == 25


@pytest.mark.parametrize(("min_tokens", "stop_after", "num_output"), [(0, 1, 1), (0, 3, 3), (2, 3, 3)])
def test_a_stop_id_ends_the_request_and_is_part_of_the_output(
    min_tokens: int, stop_after: int, num_output: int
) -> None:
    driver = Driver()
    sampling = SamplingParams(seed=0, min_tokens=min_tokens)
    driver.add(make_spec("a", 4, 8, sampling=sampling, stop_token_ids=frozenset((STOP,))))
    driver.model.stop_after["a"] = stop_after
    driver.run()
    assert driver.finish_of("a") is FinishReason.STOP
    assert len(driver.output("a")) == num_output
    assert driver.output("a")[-1] == STOP


def test_a_stop_id_before_min_tokens_is_ignored() -> None:
    driver = Driver()
    sampling = SamplingParams(seed=0, min_tokens=3)
    driver.add(make_spec("a", 4, 5, sampling=sampling, stop_token_ids=frozenset((STOP,))))
    driver.model.stop_after["a"] = 2
    driver.run()
    assert driver.finish_of("a") is FinishReason.LENGTH
    assert len(driver.output("a")) == 5


def test_other_ids_do_not_stop_a_request() -> None:
    driver = Driver()
    driver.add(make_spec("a", 4, 5))
    driver.model.stop_after["a"] = 2
    driver.run()
    assert driver.finish_of("a") is FinishReason.LENGTH


def test_hazard_scheduling_runs_past_max_tokens() -> None:
    driver = Driver()
    driver.add(*(make_spec(f"r{n}", 3 + n, n) for n in range(1, 9)))
    driver.run()
    for n in range(1, 9):
        assert len(driver.output(f"r{n}")) == n
        [row_count] = {sum(row.request_id == f"r{n}" for plan in driver.plans for row in plan.rows)}
        assert row_count == n


BAD_PROMPT = tuple(range(12))


def run_with_a_broken_row() -> Driver:
    """The row breaks in its second step; the same prompt comes again."""
    driver = Driver()
    driver.add(make_spec("bad", BAD_PROMPT, 8), make_spec("good", range(100, 112), 8))
    driver.step()
    driver.step(failing={"bad"})
    driver.add(make_spec("again", BAD_PROMPT, 8))
    driver.run()
    return driver


def test_hazard_nan_row_ends_alone_and_its_blocks_are_not_reused() -> None:
    driver = run_with_a_broken_row()
    assert driver.end("bad").finish is FinishReason.ERROR
    assert driver.end("bad").error == "logits are not finite"
    assert driver.end("again").num_cached_tokens == 0
    assert driver.output("again") == undisturbed_output(BAD_PROMPT, 8)
    assert driver.output("good") == undisturbed_output(range(100, 112), 8)


def test_control_without_forgetting_blocks_of_a_broken_row_are_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BlockPool, "forget", lambda self, blocks: None)
    assert run_with_a_broken_row().end("again").num_cached_tokens == 8


def test_a_row_without_token_ends_in_error_not_in_silence() -> None:
    driver = Driver()
    driver.add(make_spec("a"))
    plan = driver.plan()
    assert plan is not None
    result = driver.model.run(plan)
    rows = tuple(type(row)(row.request_id) for row in result.rows)
    driver.scheduler.update(StepResult(plan.step_id, rows, 0.1), 0.1)
    driver.collect()
    assert driver.finish_of("a") is FinishReason.ERROR


def test_log_probabilities_come_with_their_tokens() -> None:
    driver = Driver()
    driver.add(make_spec("a", 4, 3, sampling=SamplingParams(seed=0, num_logprobs=0)), make_spec("b", 4, 3))
    while driver.plan() is not None:
        result = driver.model.run(driver.in_flight.popleft())
        driver.scheduler.update(result, 0.0)  # updates are left to pile up
    driver.collect()
    by_id = {update.request_id: update for update in driver.updates}
    assert len(by_id["a"].logprobs) == len(by_id["a"].new_token_ids) == 3
    assert by_id["b"].logprobs == ()
    assert len(driver.updates) == 2


def test_schedule_before_update_is_caught() -> None:
    driver = Driver()
    driver.add(make_spec("a"))
    driver.plan()
    with pytest.raises(AssertionError, match="before update"):
        driver.scheduler.schedule(0.0)


def test_a_result_of_another_step_is_caught_and_changes_nothing() -> None:
    driver = Driver()
    driver.add(make_spec("a"))
    plan = driver.plan()
    assert plan is not None
    result = driver.model.run(plan)
    with pytest.raises(AssertionError, match="step 9 returned, not 0"):
        driver.scheduler.update(StepResult(9, result.rows, 0.1), 0.1)
    with pytest.raises(AssertionError, match="rows"):
        driver.scheduler.update(StepResult(0, (), 0.1), 0.1)
    driver.complete(plan)
    driver.run()
    assert len(driver.output("a")) == 4
