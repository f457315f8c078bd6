"""Gemma 3: the format's own conventions, its refusals, and the real 270M model against transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from kernels.errors import ModelFileError
from kernels.loading import load_runner
from kernels.runner import Runner
from kernels.weights.checkpoint import open_checkpoint
from kernels.weights.source import ModelSource, resolve_model
from tests.kernels.driving import generate, tokens_of
from tests.kernels.gguf_writing import write_gguf
from tests.kernels.needs import needs_compiled_path, real_model
from tests.kernels.tiny import make_model, reference_tokens, save
from tests.support.configs import runner_options

MODEL = "gemma3-270m"
LENGTHS = (1, 2, 15, 16, 17, 33, 70)


def load(model: str, dtype: str = "float32", kv_cache_bytes: int = 1 << 21, **options: Any) -> Runner:
    return load_runner(
        runner_options(
            model,
            device="cpu",
            dtype=dtype,
            kv_cache_bytes=kv_cache_bytes,
            max_num_seqs=8,
            num_threads=1,
            **options,
        )
    )


@torch.inference_mode()
def shortfalls(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: Mapping[str, Sequence[int]]
) -> torch.Tensor:
    """How far each token's logit is below that of the token that transformers would choose there; 0 is equality.

    Each is compared after the same tokens, so that a near tie that rounding decides differently counts once.
    """
    found = []
    for idx, prompt in enumerate(prompts):
        chosen = torch.tensor(tokens[str(idx)])
        logits = model(torch.tensor([[*prompt, *chosen[:-1].tolist()]])).logits[0, len(prompt) - 1 :]
        found.append(logits.amax(-1) - logits.gather(1, chosen.unsqueeze(1))[:, 0])
    return torch.cat(found)


@needs_compiled_path
@pytest.mark.parametrize("family", ["gemma3", "gemma3_untied", "gemma3_rope"])
def test_compiled_step_chooses_what_transformers_chooses_up_to_near_ties(family: str, tmp_path: Path) -> None:
    model = make_model(family).bfloat16().float()
    runner = load(str(save(model, tmp_path)), "bfloat16")
    prompts = [
        [(41 * idx + 7 * place) % 199 for place in range(length)] for idx, length in enumerate(LENGTHS)
    ]

    tokens = tokens_of(generate(runner, prompts, 24, chunk_tokens=9))

    short = shortfalls(model, prompts, tokens)
    assert (short == 0).float().mean() > 0.9
    assert short.max() < 0.4  # logits scatter by 2.6


@pytest.mark.parametrize("family", ["gemma3", "gemma3_rope"])
def test_gguf_generates_what_transformers_generates(family: str, tmp_path: Path) -> None:
    """GGUF has no place for the attention scale: llama.cpp derives it from the head size."""
    model = make_model(family)
    for layer in model.model.layers:
        layer.self_attn.scaling = model.config.head_dim**-0.5
    prompts = [[5, 6, 7], list(range(3, 60))]

    runner = load(str(write_gguf(model, tmp_path / "m.gguf", "gemma3")))
    tokens = tokens_of(generate(runner, prompts, 16, chunk_tokens=9))

    assert tokens == {str(idx): reference_tokens(model, prompt, 16) for idx, prompt in enumerate(prompts)}


def test_bfloat16_keeps_the_norms_in_float32(tmp_path: Path) -> None:
    """1 + w in bfloat16 would round w to steps of 1/128."""
    model = make_model("gemma3")
    name = "model.layers.1.self_attn.q_norm.weight"
    expected = model.state_dict()[name] + 1

    for path in (save(model, tmp_path / "folder"), write_gguf(model, tmp_path / "m.gguf", "gemma3")):
        weights = open_checkpoint(resolve_model(str(path)), torch.bfloat16).weights
        assert torch.equal(weights[name], expected)
        assert weights["model.embed_tokens.weight"].dtype is torch.bfloat16


def test_config_of_transformers_4_reads_the_same(tmp_path: Path) -> None:
    folder = save(make_model("gemma3_rope"), tmp_path)
    wanted = open_checkpoint(resolve_model(str(folder)), torch.float32).config
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    del raw["layer_types"], raw["_sliding_window_pattern"], raw["tie_word_embeddings"]
    raw |= {
        "sliding_window_pattern": 3,
        "rope_theta": rope["full_attention"]["rope_theta"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    (folder / "config.json").write_text(json.dumps(raw))

    assert open_checkpoint(resolve_model(str(folder)), torch.float32).config == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("use_bidirectional_attention", True),
        ("hidden_activation", "relu"),
        ("sliding_window", 0),
        ("layer_types", ["chunked_attention"] * 6),
    ],
)
def test_fields_that_change_the_arithmetic_are_refused(name: str, value: object, tmp_path: Path) -> None:
    folder = save(make_model("gemma3"), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {name: value}))

    with pytest.raises(ModelFileError, match=name):
        open_checkpoint(resolve_model(str(folder)), torch.float32)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_model_that_reads_pictures(prefix: str, tmp_path: Path) -> None:
    """Names as in published checkpoints and as transformers 5 writes them."""
    model = make_model("gemma3")
    folder = save(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    moved = {name.replace("model.", prefix, 1): values for name, values in tensors.items()}
    moved["vision_tower.vision_model.embeddings.position_embedding.weight"] = torch.zeros(4, 4)
    save_file(moved, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(
            {"model_type": "gemma3", "text_config": raw, "vision_config": {}, "eos_token_id": [1, 106]}
        )
    )

    runner = load(str(folder))

    (generation,) = generate(runner, [[3, 4, 5]], 8)
    assert generation.tokens == reference_tokens(model, [3, 4, 5], 8)
    assert runner.eos_token_ids == (2, 1, 106)  # generation_config.json's first


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return real_model(MODEL)


@pytest.fixture(scope="module")
def reference(source: ModelSource) -> PreTrainedModel:
    """transformers' Gemma 3 on the same dequantized weights."""
    weights = open_checkpoint(source, torch.float32).weights
    state = {name: values - 1 if name.endswith("norm.weight") else values for name, values in weights.items()}
    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        query_pre_attn_scalar=256,
    )
    model = Gemma3ForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    return model.eval()


PROMPTS = (
    [2, 818, 5279, 529, 7001, 563],  # The capital of France is
    [2],
    [2, *range(1000, 1030)],
    [2, 1156, 138, 35220, 108, 902, 236743],
)
NUM_TOKENS = 12


@pytest.mark.model
def test_the_270m_model_equals_transformers(source: ModelSource, reference: PreTrainedModel) -> None:
    runner = load(MODEL, kv_cache_bytes=1 << 26)

    tokens = tokens_of(generate(runner, PROMPTS, NUM_TOKENS, chunk_tokens=11))

    assert tokens == {
        str(idx): reference_tokens(reference, prompt, NUM_TOKENS) for idx, prompt in enumerate(PROMPTS)
    }


LONG_PROMPT = [2, *((7 * idx * idx) % 2000 + 500 for idx in range(599))]
"""A prompt in whose chunks of 250 the layers with a window of 512 no longer see the beginning."""


@pytest.mark.model
def test_the_270m_model_equals_transformers_past_its_window(
    source: ModelSource, reference: PreTrainedModel
) -> None:
    runner = load(MODEL, kv_cache_bytes=1 << 26)

    (generation,) = generate(runner, [LONG_PROMPT], 4, chunk_tokens=250)

    assert generation.tokens == reference_tokens(reference, LONG_PROMPT, 4)


@pytest.mark.model
@needs_compiled_path
@pytest.mark.parametrize(
    ("quantization", "tie", "agreeing"),
    [("none", 0.1, 0.95), pytest.param("int8", 0.5, 0.85, marks=pytest.mark.slow)],
)
def test_the_270m_model_on_the_compiled_path_parts_from_transformers_only_at_near_ties(
    quantization: str, tie: float, agreeing: float, source: ModelSource, reference: PreTrainedModel
) -> None:
    """Its logits have a standard deviation of 5."""
    runner = load(MODEL, "bfloat16", kv_cache_bytes=1 << 26, quantization=quantization)

    tokens = tokens_of(generate(runner, PROMPTS, NUM_TOKENS, chunk_tokens=11))
    (past_window,) = generate(runner, [LONG_PROMPT], 4, chunk_tokens=250)

    short = torch.cat(
        (
            shortfalls(reference, PROMPTS, tokens),
            shortfalls(reference, [LONG_PROMPT], {"0": past_window.tokens}),
        )
    )
    assert (short == 0).float().mean() > agreeing
    assert short.max() < tie
