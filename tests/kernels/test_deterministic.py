"""The engine without a model: its tokens follow from the tokens before them, and only through the right blocks."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.deterministic import (
    EOS_TOKEN_ID,
    DeterministicRunner,
    StepTime,
    expected_tokens,
)
from kernels.runner import Runner
from scheduler.plan import SamplingParams, ScheduledRow, StepPlan
from tests.kernels.driving import GREEDY, Driver, Generation, generate, tokens_of
from tests.support.configs import deterministic_options

PROMPTS = [
    list(text.encode()) for text in ("a", "water", "a queue holds work until", "x" * 16, "y" * 100, "é日")
]


def make_runner(**options: object) -> DeterministicRunner:
    return DeterministicRunner(replace(deterministic_options(num_blocks=256, block_size=4), **options))  # type: ignore[arg-type]


@pytest.mark.process
def test_is_a_runner_that_needs_no_torch() -> None:
    code = "import sys, kernels.deterministic, kernels.runner, kernels.weights.source; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    runner: Runner = make_runner()
    assert (runner.vocab_size, runner.num_blocks, runner.block_size, runner.max_model_len) == (
        257,
        256,
        4,
        1024,
    )


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 1 << 30])
def test_batched_and_chunked_equals_expected_tokens(chunk_tokens: int) -> None:
    tokens = tokens_of(generate(make_runner(), PROMPTS, 30, chunk_tokens=chunk_tokens))

    assert tokens == {str(idx): list(expected_tokens(prompt, 30)) for idx, prompt in enumerate(PROMPTS)}


def test_output_is_words_of_printable_ascii() -> None:
    text = bytes(expected_tokens(b"hello", 2000)).decode("ascii")

    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert 200 < text.count(" ") < 470


def test_preemption_and_another_worker_give_the_same_tokens() -> None:
    generation = Generation("0", PROMPTS[2], 40)
    driver = Driver(make_runner())
    driver.add(generation)
    for _ in range(10):
        driver.step()
    driver.remove(generation)
    driver.add(Generation("filler", PROMPTS[4], 20), generation)
    for _ in range(10):
        driver.step()
    driver.remove(generation)

    other_worker = Driver(make_runner(block_size=8), seed=5)
    other_worker.add(generation)
    other_worker.run()

    assert generation.tokens == list(expected_tokens(PROMPTS[2], 40))


def _row(tokens: tuple[int, ...], computed: int, table: tuple[int, ...], **fields: object) -> ScheduledRow:
    row = ScheduledRow("r", 0, tokens, computed, table, GREEDY, num_generated_tokens=0)
    return replace(row, **fields)  # type: ignore[arg-type]


def _token(runner: DeterministicRunner, row: ScheduledRow, **plan: object) -> int | None:
    (result,) = runner.step(StepPlan(0, (row,), **plan)).rows  # type: ignore[arg-type]
    return result.token_id


def test_prefix_hit_continues_from_blocks_of_another_request() -> None:
    runner, prompt = make_runner(), tuple(b"shared prefix")
    _token(runner, _row(prompt, 0, (7, 3, 9, 1)))

    hit = _token(runner, _row(prompt[8:], 8, (7, 3, 20, 21), request_id="other"))

    assert (hit,) == expected_tokens(prompt, 1)


def test_copied_block_continues_and_its_source_stays() -> None:
    runner, prompt = make_runner(), tuple(b"abcdef")
    first = _token(runner, _row(prompt, 0, (7, 3)))
    assert first is not None

    copied = _token(runner, _row((first,), 6, (7, 5)), block_copies=((3, 5),))
    beside = _token(runner, _row((ord("z"),), 6, (7, 3)))

    assert (copied,) == expected_tokens((*prompt, first), 1)
    assert (beside,) == expected_tokens((*prompt, ord("z")), 1)


@pytest.mark.parametrize("table", [(7, 4, 9), (3, 7, 9), (7, 3), (11, 3, 9)])
def test_wrong_or_unwritten_block_is_found_out(table: tuple[int, ...]) -> None:
    runner, prompt = make_runner(), tuple(b"twelve bytes")
    _token(runner, _row(prompt, 0, (7, 3, 9)))
    _token(runner, _row(tuple(b"other"), 0, (11, 12)))

    with pytest.raises(AssertionError, match="request r: "):
        _token(runner, _row((ord("x"),), 12, (*table, 20) if len(table) == 3 else table))


def test_block_overwritten_by_another_request_is_found_out() -> None:
    runner, prompt = make_runner(), tuple(b"twelve bytes")
    _token(runner, _row(prompt, 0, (7, 3, 9)))
    _token(runner, _row(tuple(b"thief"), 0, (30, 3)))

    with pytest.raises(AssertionError, match="block 3 does not continue"):
        _token(runner, _row((ord("x"),), 12, (7, 3, 9, 10)))


def test_end_of_sequence_comes_when_configured_and_not_while_banned() -> None:
    expected = expected_tokens(b"some", 1000, eos_one_in=20)
    assert expected[-1] == EOS_TOKEN_ID
    assert len(expected) < 1000
    runner = make_runner(eos_one_in=20)

    (free,) = generate(runner, [list(b"some")], len(expected))
    banning = SamplingParams(seed=0, banned_token_ids=(EOS_TOKEN_ID,), min_tokens=100)
    (banned,) = generate(runner, [list(b"some")], 100, banning)

    assert tuple(free.tokens) == expected
    assert EOS_TOKEN_ID not in banned.tokens
    assert EOS_TOKEN_ID not in expected_tokens(b"some", 5000)


def test_poisoned_request_ends_in_an_error_and_its_neighbours_do_not() -> None:
    prompts = [*PROMPTS[:3], list(b"bad \x07 bell"), *PROMPTS[3:]]

    generations = generate(make_runner(poison_token_id=7), prompts, 10, chunk_tokens=4)

    assert generations[3].error is not None
    assert generations[3].tokens == []
    for generation, prompt in zip(generations, prompts, strict=True):
        if generation is not generations[3]:
            assert tuple(generation.tokens) == expected_tokens(prompt, 10)


def test_token_outside_the_vocabulary_ends_its_own_row_only() -> None:
    bad, good = generate(make_runner(), [[300], [65]], 3)

    assert bad.error == "token 300 is outside the vocabulary of 257 tokens"
    assert tuple(good.tokens) == expected_tokens([65], 3)


def test_logprobs_say_that_the_token_is_certain() -> None:
    (generation,) = generate(make_runner(), [[65]], 2, replace(GREEDY, num_logprobs=3))

    assert [entry.top for entry in generation.logprobs if entry] == [((t, 0.0),) for t in generation.tokens]


def test_step_time_counts_prefill_tokens_and_decoding_rows() -> None:
    plan = StepPlan(0, (_row((1,), 4, (0, 1)), _row((1,), 4, (2, 3)), _row((1, 2, 3), 0, (4,))))

    assert StepTime(step_s=1.0, prefill_token_s=0.1, decode_row_s=0.01).of(plan) == pytest.approx(1.32)


def test_step_takes_at_least_its_configured_time() -> None:
    runner = make_runner(step_time=StepTime(step_s=0.005))

    assert runner.step(StepPlan(3, (_row((1,), 0, (0,)),))).step_time_s >= 0.005


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8),
    preempt_at=st.lists(st.integers(0, 20), max_size=5),
    chunk_tokens=st.integers(1, 16),
    seed=st.integers(0, 9),
)
def test_any_order_of_preemptions_gives_the_expected_tokens(
    prompts: list[bytes], preempt_at: list[int], chunk_tokens: int, seed: int
) -> None:
    driver = Driver(make_runner(), chunk_tokens=chunk_tokens, seed=seed)
    generations = [Generation(str(idx), list(prompt), 12) for idx, prompt in enumerate(prompts)]
    driver.add(*generations)
    step = 0
    while driver.running:
        if step in preempt_at:
            victim = driver.running[step % len(driver.running)]
            driver.remove(victim)
            driver.add(victim)
        driver.step()
        step += 1

    assert [tuple(g.tokens) for g in generations] == [expected_tokens(prompt, 12) for prompt in prompts]
