"""The runner on tiny random models: isolation of rows, the pool's blocks, seeds, penalties."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kernels.loading import load_runner
from kernels.runtime.model_runner import ModelRunner
from scheduler.plan import SamplingParams, ScheduledRow, StepPlan
from tests.kernels.driving import GREEDY, Driver, Generation, generate, tokens_of
from tests.kernels.tiny import make_model, reference_tokens, save
from tests.support.configs import runner_options

NAN_TOKEN = 5
PROMPTS = [[7, 8, 9], [10] * 17, list(range(20, 60)), [3, 1, 4, 1, 5 + 1, 9, 2, 6]]

Load = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def folder_with_nan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, except that one token's embedding is NaN."""
    model = make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[NAN_TOKEN] = math.nan
    return save(model, tmp_path_factory.mktemp("nan"))


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> dict[str, list[int]]:
    return {str(idx): reference_tokens(model, prompt, 12) for idx, prompt in enumerate(PROMPTS)}


def load(folder: Path, **fields: object) -> ModelRunner:
    options = runner_options(
        str(folder), device="cpu", dtype="float32", kv_cache_bytes=1 << 21, max_num_seqs=33, num_threads=1
    )
    options = replace(options, **fields)  # type: ignore[arg-type]
    return load_runner(options)


def test_slots_never_written_do_not_reach_the_logits(folder: Path, expected: dict[str, list[int]]) -> None:
    """0 × NaN is NaN: attention must skip memory beyond a row's context, not give it weight zero."""
    runner = load(folder)
    pool = runner._model.kv_pool
    pool.keys.fill_(math.nan)
    pool.values.fill_(math.nan)

    assert tokens_of(generate(runner, PROMPTS, 12, chunk_tokens=11)) == expected


def test_nan_row_ends_alone_and_its_blocks_can_be_used_again(
    folder_with_nan: Path, expected: dict[str, list[int]]
) -> None:
    runner = load(folder_with_nan)
    driver = Driver(runner, chunk_tokens=16)
    poisoned = Generation("bad", [1, 2, NAN_TOKEN, *range(60, 90)], 12)
    good = [Generation(str(idx), prompt, 12) for idx, prompt in enumerate(PROMPTS[:3])]
    driver.add(good[0], poisoned, good[1], good[2])
    driver.run()
    late = Generation("3", PROMPTS[3], 12)
    driver.free_blocks.sort(key=lambda block: block in poisoned.blocks)  # those are taken first
    driver.add(late)
    driver.run()

    assert set(late.blocks) <= set(poisoned.blocks)
    assert poisoned.error is not None
    assert poisoned.tokens == []
    assert tokens_of([*good, late]) == expected


def _runs_beside(folder: Path, dtype: str, last_prompt: Sequence[int], fill: float) -> list[Generation]:
    """Three prompts beside one more that ends with its first token, over a pool filled with one number."""
    runner = load(folder, dtype=dtype)
    runner._model.kv_pool.keys.fill_(fill)
    runner._model.kv_pool.values.fill_(fill)
    generations = [Generation(str(idx), prompt, 10, ASKING) for idx, prompt in enumerate(PROMPTS[:3])]
    last = Generation("3", last_prompt, 1, ASKING)
    driver = Driver(runner, chunk_tokens=16)
    driver.add(*generations[:2], last, generations[2])
    driver.run()
    return [*generations, last]


ASKING = replace(GREEDY, num_logprobs=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_of_nan_are_equal_bit_for_bit(folder_with_nan: Path, dtype: str) -> None:
    """Against the same batch with an ordinary token in the place of the NaN one, and with NaN in unused slots."""
    *calm, ordinary = _runs_beside(folder_with_nan, dtype, [1, 2, 4, *range(60, 70)], 0.0)
    *beside, broken = _runs_beside(folder_with_nan, dtype, [1, 2, NAN_TOKEN, *range(60, 70)], math.nan)

    assert (ordinary.error, broken.error is None) == (None, False)
    assert [g.tokens for g in beside] == [g.tokens for g in calm]
    assert [g.logprobs for g in beside] == [g.logprobs for g in calm]


def test_token_outside_the_vocabulary_ends_its_own_row_only(
    folder: Path, expected: dict[str, list[int]]
) -> None:
    generations = generate(load(folder), [PROMPTS[0], [1, 199, 2], [-1], *PROMPTS[1:]], 12)

    assert generations[1].error == "token 199 is outside the vocabulary of 199 tokens"
    assert generations[2].error == "token -1 is outside the vocabulary of 199 tokens"
    good = [generation.tokens for generation in generations if generation.error is None]
    assert good == list(expected.values())


SEEDED = [
    SamplingParams(seed=1000 + idx, temperature=0.9, top_p=0.95 if idx % 2 else 1.0, top_k=40 * (idx % 3))
    for idx in range(32)
]


def test_same_seed_same_tokens_alone_and_in_a_batch_of_32(folder: Path) -> None:
    runner = load(folder)
    prompts = [[idx + 1, 2, 3 * idx + 1] * (1 + idx % 7) for idx in range(32)]

    together = tokens_of(generate(runner, prompts, 20, SEEDED, chunk_tokens=13))

    for idx in (0, 1, 7, 31):
        (alone,) = generate(runner, [prompts[idx]], 20, SEEDED[idx])
        assert alone.tokens == together[str(idx)]


def test_seeds_matter(folder: Path) -> None:
    same_prompt = tokens_of(generate(load(folder), [[1, 2, 3]] * 8, 20, SEEDED[:8]))

    assert len({tuple(tokens) for tokens in same_prompt.values()}) == 8


PENALISED = SamplingParams(
    seed=3,
    temperature=0.7,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.1,
    num_logprobs=2,
)


def test_preemption_does_not_change_seeded_and_penalised_tokens(folder: Path) -> None:
    runner = load(folder)
    (undisturbed,) = generate(runner, [PROMPTS[1]], 30, PENALISED)
    driver = Driver(runner)
    generation = Generation("0", PROMPTS[1], 30, PENALISED)
    driver.add(Generation("before", PROMPTS[0], 25), generation)
    for _ in range(9):
        driver.step()

    driver.remove(generation)
    driver.add(Generation("taker of the slot", PROMPTS[2], 10, PENALISED))
    driver.step()
    driver.add(generation)
    driver.run()

    assert generation.tokens == undisturbed.tokens
    assert [entry is not None for entry in generation.logprobs] == [True] * 30


def _step(
    runner: ModelRunner, *rows: ScheduledRow, copies: Sequence[tuple[int, int]] = ()
) -> list[int | None]:
    return [result.token_id for result in runner.step(StepPlan(0, rows, block_copies=tuple(copies))).rows]


def test_copied_block_continues_and_its_source_stays(folder: Path) -> None:
    runner = load(folder)
    prompt = tuple(range(30, 50))
    (first,) = _step(runner, ScheduledRow("a", 0, prompt, 0, (4, 9), GREEDY, 0))
    assert first is not None

    forked = ScheduledRow("b", 1, (first,), 20, (4, 2), GREEDY, 1)
    other = ScheduledRow("a", 0, (77,), 20, (4, 9), GREEDY, 1)
    tokens = _step(runner, forked, other, copies=((9, 2),))

    fresh = load(folder)
    assert tokens == _step(
        fresh,
        ScheduledRow("x", 0, (*prompt, first), 0, (0, 1), GREEDY, 0),
        ScheduledRow("y", 1, (*prompt, 77), 0, (2, 3), GREEDY, 0),
    )


def test_prefix_hit_equals_computing_the_prefix(folder: Path) -> None:
    runner = load(folder)
    prompt = tuple(range(30, 70))
    _step(runner, ScheduledRow("a", 0, prompt[:35], 0, (4, 9, 5), GREEDY, 0))

    hit = _step(runner, ScheduledRow("b", 1, prompt[32:], 32, (4, 9, 11), GREEDY, 0))

    assert hit == _step(load(folder), ScheduledRow("x", 0, prompt, 0, (0, 1, 2), GREEDY, 0))


def test_results_come_in_plan_order_with_nothing_for_unsampled_rows(folder: Path) -> None:
    rows = (
        ScheduledRow("a", 3, (1, 2, 3), 0, (1,), None, 0),
        ScheduledRow("b", 1, (1, 2, 3), 0, (2,), GREEDY, 0),
        ScheduledRow("c", 0, (4, 5), 0, (3,), None, 0),
    )

    result = load(folder).step(StepPlan(41, rows))

    assert result.step_id == 41
    assert result.step_time_s > 0
    assert [row.request_id for row in result.rows] == ["a", "b", "c"]
    assert [row.token_id is None for row in result.rows] == [True, False, True]


def test_plan_without_sampled_rows_and_plan_without_rows(folder: Path) -> None:
    runner = load(folder)

    (row,) = runner.step(StepPlan(1, (ScheduledRow("a", 0, (1, 2), 0, (1,), None, 0),))).rows
    assert (row.token_id, row.error) == (None, None)
    assert runner.step(StepPlan(2, (), released_slots=(0,))).rows == ()


def test_warmup_changes_no_tokens(folder: Path, expected: dict[str, list[int]]) -> None:
    runner = load(folder)
    runner.warmup()

    assert tokens_of(generate(runner, PROMPTS, 12)) == expected


@pytest.mark.parametrize(
    "fields", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["bfloat16", "int8"]
)
def test_lower_precision_gives_nearly_the_same_distribution(fields: dict[str, str], folder: Path) -> None:
    ask = replace(GREEDY, num_logprobs=5)
    exact = generate(load(folder), PROMPTS, 1, ask)
    rounded = generate(load(folder, **fields), PROMPTS, 1, ask)

    for one, other in zip(exact, rounded, strict=True):
        first, second = one.logprobs[0], other.logprobs[0]
        assert first is not None
        assert second is not None
        assert first != second
        common = dict(first.top).keys() & dict(second.top).keys()
        assert len(common) >= 3
        assert all(abs(dict(first.top)[i] - dict(second.top)[i]) < 0.35 for i in common)
