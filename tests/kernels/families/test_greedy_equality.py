"""Greedy tokens in float32 equal those of transformers on the same weights, for every family."""

import random
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from kernels.loading import load_runner
from kernels.runner import Runner
from tests.kernels.driving import generate, tokens_of
from tests.kernels.tiny import FAMILIES, make_model, reference_tokens, save
from tests.support.configs import runner_options

NUM_TOKENS = 24


def _prompts(vocab_size: int) -> list[list[int]]:
    """Lengths on both sides of block edges, from one token up."""
    draw = random.Random(7)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in (1, 2, 15, 16, 17, 33, 70)]


def _load(folder: Path, block_size: int = 16) -> Runner:
    return load_runner(
        runner_options(
            str(folder),
            device="cpu",
            dtype="float32",
            block_size=block_size,
            kv_cache_bytes=1 << 21,
            max_num_seqs=8,
            num_threads=1,
        )
    )


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    model = make_model(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(family: tuple[PreTrainedModel, Path]) -> dict[str, list[int]]:
    model, _ = family
    prompts = _prompts(model.config.vocab_size)
    return {str(idx): reference_tokens(model, prompt, NUM_TOKENS) for idx, prompt in enumerate(prompts)}


@pytest.mark.parametrize(("block_size", "chunk_tokens"), [(16, 1 << 30), (16, 7), (48, 32)])
def test_batch_equals_transformers(
    family: tuple[PreTrainedModel, Path], expected: dict[str, list[int]], block_size: int, chunk_tokens: int
) -> None:
    model, folder = family
    runner = _load(folder, block_size)

    generations = generate(runner, _prompts(model.config.vocab_size), NUM_TOKENS, chunk_tokens=chunk_tokens)

    assert tokens_of(generations) == expected


def test_alone_equals_transformers(
    family: tuple[PreTrainedModel, Path], expected: dict[str, list[int]]
) -> None:
    model, folder = family
    runner = _load(folder)

    for idx, prompt in enumerate(_prompts(model.config.vocab_size)):
        (generation,) = generate(runner, [prompt], NUM_TOKENS)
        assert generation.tokens == expected[str(idx)]
