"""The tensors of Hugging Face folders: types, shards, and folders that are damaged or foreign."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kernels.errors import ModelFileError
from kernels.weights.safetensors_folder import SafetensorsFolder
from tests.kernels.tiny import load, make_model, save


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("qwen2")


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    return save(model, tmp_path / "model")


@pytest.fixture
def sharded(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


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


def test_shards_are_read_through_their_index(model: PreTrainedModel, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2

    checkpoint = load(sharded)

    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in model.state_dict().items())


def test_missing_shard_is_named(sharded: Path) -> None:
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()

    with pytest.raises(ModelFileError, match=lost.name):
        load(sharded)


def test_shard_without_a_promised_tensor_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = min(tensors)
    del tensors[name]
    save_file(tensors, shard)

    with pytest.raises(ModelFileError, match=rf"{shard.name} lacks 1 tensors .*, such as {name}"):
        load(sharded)


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


@pytest.mark.parametrize("shard", ["x" * 300, "", ".", "a\x00b", 5, None, ["a"]])
def test_a_shard_that_no_file_can_be_is_refused(shard: object, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelFileError, match="names the shard"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize(
    "text", ["[" * 2000 + "]" * 2000, '{"weight_map": 5}', '{"weight_map": [[1]]}', "\ud800"]
)
def test_an_index_that_is_none_is_refused(text: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ModelFileError, match="is no index of shards"):
        SafetensorsFolder(folder)


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
