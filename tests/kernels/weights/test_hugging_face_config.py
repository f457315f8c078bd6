"""A config.json: fields of both generations of transformers, and values that no decoder computes."""

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.errors import ModelFileError
from kernels.model_config import RopeScaling
from kernels.weights.hugging_face import read_config
from tests.kernels.config_writing import write_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA = {"model_type": "gemma3_text"}


def test_rope_of_transformers_4_and_5(tmp_path: Path) -> None:
    old = read_config(write_config(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3))
    new = read_config(write_config(tmp_path, rope_parameters={**LLAMA3, "rope_theta": 5e5}))

    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({}, None),
        ({"rope_scaling": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeScaling("linear", 4.0)),
    ],
)
def test_rope_scaling_kinds(fields: dict[str, Any], scaling: RopeScaling | None, tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, **fields))

    assert (config.rope_theta, config.rope_scaling) == (10000.0, scaling)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', which the native decoders do not compute"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\], which"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters has rope_type 'yarn', which",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which"),
        ({"attention_bias": True}, "attention_bias is True, which"),
        ({"is_causal": False}, "is_causal is False, which"),
        ({"rope_scaling": [4.0]}, "rope_parameters must be an object, not list"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\) is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which"),
        ({"hidden_size": ...}, "hidden_size is None; it must be a positive integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be a positive integer"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a positive number"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ({"bos_token_id": [1]}, r"bos_token_id is \[1\]; it must be an id"),
        ({"quantization_config": 5}, r"quantization_config \(5\) is not supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; the limit is 1024"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; the limit"),
        ({"hidden_size": 10**400}, "hidden_size is 1000.*; the limit is 2147483647"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*; it must be a positive number"),
        ({**GEMMA, "rope_parameters": {"sliding_attention": 5}}, "sliding_attention must be an object"),
        ({**GEMMA, "rope_parameters": {"full_attention": [5]}}, "full_attention must be an object"),
        ({**GEMMA, "layer_types": [[], {}]}, "layer_types must name 2 layers"),
        ({**GEMMA, "query_pre_attn_scalar": 10**400}, "query_pre_attn_scalar is 1000"),
    ],
)
def test_unusable_config_names_field_and_value(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_config(write_config(tmp_path, **fields))


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 2000 + "]" * 2000])
def test_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_config(tmp_path)


def test_end_of_sequence_ids_of_both_files(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=[5, 2])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))

    assert read_config(tmp_path).eos_token_ids == (7, 5, 2)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"model_type": "llama", "sliding_window": 16, "use_sliding_window": False}, None),
        ({"model_type": "mistral", "sliding_window": 16}, 16),
        ({"model_type": "mistral", "sliding_window": 16, "use_sliding_window": False}, 16),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 0}, None),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}, None),
        (
            {"model_type": "qwen3", "sliding_window": 16, "max_window_layers": 0, "use_sliding_window": True},
            16,
        ),
    ],
)
def test_windows_are_those_that_transformers_would_apply(
    fields: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    config = read_config(write_config(tmp_path, **fields))
    assert {config.window(idx) for idx in range(config.num_layers)} == {window}
