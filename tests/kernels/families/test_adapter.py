"""Models that are not native generate through the adapter the tokens that transformers generates."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.kernels.driving import generate, tokens_of
from tests.kernels.families.adapter_models import FAMILIES, GROUPED, assert_telling, load, make, saved
from tests.kernels.tiny import reference_tokens

NUM_TOKENS = 12


def _prompts() -> list[list[int]]:
    """Lengths on both sides of block edges, of windows and of chunks of attention."""
    draw = random.Random(7)
    return [[draw.randrange(3, 199) for _ in range(length)] for length in (1, 15, 16, 17, 41)]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    return saved(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(family: tuple[PreTrainedModel, Path]) -> dict[str, list[int]]:
    model, _ = family
    rows = [reference_tokens(model, prompt, NUM_TOKENS) for prompt in _prompts()]
    assert_telling(rows)
    return {str(idx): row for idx, row in enumerate(rows)}


CUT_IN_EVERY_RUN = {"gemma2", "gpt2", "gpt_oss", "llama4_text"}
"""Windows, learned positions, sinks and chunks of attention; the others differ in what chunks do not touch."""


@pytest.mark.parametrize(
    ("family", "block_size", "chunk_tokens"),
    [
        *((name, 16, 1 << 30) for name in sorted(FAMILIES)),
        *(
            pytest.param(name, 48, 7, marks=() if name in CUT_IN_EVERY_RUN else pytest.mark.slow)
            for name in sorted(FAMILIES)
        ),
    ],
    indirect=["family"],
)
def test_batch_equals_transformers(
    family: tuple[PreTrainedModel, Path], expected: dict[str, list[int]], block_size: int, chunk_tokens: int
) -> None:
    runner = load(family[1], block_size=block_size)

    assert tokens_of(generate(runner, _prompts(), NUM_TOKENS, chunk_tokens=chunk_tokens)) == expected
    assert runner.eos_token_ids == (2,)


def test_bfloat16_loads(family: tuple[PreTrainedModel, Path]) -> None:
    """The check of logits at loading allows for rounding."""
    runner = load(family[1], dtype="bfloat16")

    (generation,) = generate(runner, [[3, 4, 5]], 2)
    assert generation.error is None


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, 256),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            256,
        ),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "short_factor": [1.0] * 8,
                "long_factor": [3.0] * 8,
                "original_max_position_embeddings": 64,
            },
            64,
        ),
    ],
    ids=["dynamic", "yarn", "longrope"],
)
def test_rotation_that_depends_on_the_batch_limits_the_length(
    rope: dict[str, object], limit: int, tmp_path: Path
) -> None:
    """A longer row would rotate the keys of other rows differently from those in their blocks."""
    _, folder = saved(make("Olmo2ForCausalLM", "Olmo2Config", **GROUPED, rope_parameters=rope), tmp_path)

    assert load(folder).max_model_len == limit


def test_two_adapted_models_do_not_mix(tmp_path: Path) -> None:
    runners, expected = [], []
    for name in ("olmo2", "gpt2"):
        model, folder = saved(FAMILIES[name], tmp_path / name)
        runners.append(load(folder))
        expected.append(reference_tokens(model, [3, 4, 5], 4))

    found = [generate(runner, [[3, 4, 5]], 4)[0].tokens for runner in runners]

    assert found == expected


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4_text"])
def test_what_attention_does_besides_shows_in_the_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without soft-capping, sinks and chunks these models generate other tokens."""
    model, folder = saved(FAMILIES[name], tmp_path)
    expected = [reference_tokens(model, prompt, NUM_TOKENS) for prompt in _prompts()]
    runner = load(folder)
    _forget(monkeypatch, softcap=None, sinks=None, chunk=None)

    found = tokens_of(generate(runner, _prompts(), NUM_TOKENS))

    assert list(found.values()) != expected


def _forget(monkeypatch: pytest.MonkeyPatch, **fields: None) -> None:
    from kernels.models.transformers import adapter

    right: Callable[..., object] = adapter.Scores
    monkeypatch.setattr(adapter, "Scores", lambda *args, **kwargs: right(*args, **kwargs | fields))
