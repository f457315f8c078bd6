"""What only Gemma 3 needs of the compiled step. Each part must show in the logits: its absence is then noticed."""

from dataclasses import replace

import pytest
import torch

from kernels.loading import make_decoder
from kernels.model_config import ModelConfig, RopeScaling
from kernels.models.decoder_weights import rounded_embedding_scale
from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.runtime.kv_pool import KVPool
from tests.kernels.models.cpu.test_fused import (
    BLOCK_SIZE,
    GEMMA3,
    NUM_BLOCKS,
    ROWS,
    make_batch,
    make_config,
    make_exact,
    make_model,
    make_weights,
)


@pytest.fixture(autouse=True)
def _needs_cpu_kernels() -> None:
    if not cpu_kernels_supported():
        pytest.skip("this processor has no AVX-512 bfloat16 and int8 dot products")


def _with_shape(**changes: object) -> ModelConfig:
    return make_config(**GEMMA3 | changes)


OTHERS = {
    "first_window": _with_shape(layer_windows=(11, 24, None, 7)),
    "last_window": _with_shape(layer_windows=(10, 24, None, 8)),
    "no_window": _with_shape(layer_windows=(10, 24, 30, 7)),
    "local_theta": _with_shape(local_rope_theta=350.0),
    "attention_scale": _with_shape(attention_scale=0.25),
    "rope_scaling": replace(_with_shape(), rope_scaling=RopeScaling("linear", 8.0)),
    "no_head_norms": replace(_with_shape(), qk_norm=False),
}


@pytest.mark.parametrize("other", OTHERS)
def test_control_a_model_that_differs_in_one_thing_is_told_apart(other: str) -> None:
    batch = make_batch(ROWS, every_token=True)
    expected, got = make_exact(_with_shape()).forward(batch), make_model(OTHERS[other]).forward(batch)
    assert (got - expected).norm() / expected.norm() > 0.02


@pytest.mark.parametrize(
    "name",
    [
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "input_layernorm",
    ],
)
def test_control_each_norm_shows_in_the_logits(name: str) -> None:
    config, batch = make_config(**GEMMA3), make_batch(ROWS, every_token=True)
    expected = make_exact(config).forward(batch)
    weights = make_weights(config)
    weights[f"model.layers.3.{name}.weight"] = torch.ones(config.hidden_size)
    pool = KVPool(config, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16)
    got = make_decoder(config, weights, pool, dtype=torch.bfloat16, num_threads=1).forward(batch)
    assert (got - expected).norm() / expected.norm() > 0.02


def test_embeddings_are_scaled_by_the_root_that_the_model_was_trained_with() -> None:
    config = make_config(hidden_size=640, embedding_scale=640**0.5)
    assert rounded_embedding_scale(config, torch.bfloat16) == 25.25
    assert rounded_embedding_scale(make_config(), torch.bfloat16) == 1.0


def test_prompt_in_chunks_is_the_prompt_in_float32() -> None:
    """Chunks that begin within and beyond the windows, beside a decoding row."""
    config = make_config(**GEMMA3)
    exact, model = make_exact(config), make_model(config)
    table = (2, 9, 4, 12, 15)
    expected = exact.forward(make_batch([(table, 0, 71)]))
    model.forward(make_batch([((11,), 0, 5), (table, 0, 9)]))
    model.forward(make_batch([((11,), 5, 1), (table, 9, 27)]))
    got = model.forward(make_batch([((11,), 6, 1), (table, 36, 35)]))[1]
    assert (got - expected[0]).norm() / expected[0].norm() < 0.015
