"""GGUF files: round trips through the gguf package's writer, and damaged or foreign files."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from kernels.errors import ModelFileError
from kernels.loading import load_runner
from kernels.model_config import RopeScaling
from kernels.weights.checkpoint import open_checkpoint
from kernels.weights.gguf_config import llama3_factors
from kernels.weights.source import resolve_model
from tests.kernels.driving import generate, tokens_of
from tests.kernels.gguf_writing import write_gguf
from tests.kernels.tiny import load, make_model, reference_tokens
from tests.support.configs import runner_options

ARCHITECTURES = {
    "llama": "llama",
    "llama_tied": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def llama_file(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(llama, tmp_path_factory.mktemp("gguf") / "llama.gguf", "llama")


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_every_tensor_and_the_config_come_back(family: str, tmp_path: Path) -> None:
    model = make_model(family)

    checkpoint = load(write_gguf(model, tmp_path / "m.gguf", ARCHITECTURES[family]))

    wanted = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert set(checkpoint.weights) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(checkpoint.weights[name], tensor), name
    config = checkpoint.config
    assert config.num_layers == model.config.num_hidden_layers
    assert config.num_kv_heads == model.config.num_key_value_heads
    assert config.vocab_size == model.config.vocab_size
    assert config.tie_word_embeddings == model.config.tie_word_embeddings
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType[name] for name in ("F16", "BF16", "Q4_0", "Q4_1", "Q8_0")]
)
def test_stored_types_are_dequantized(
    kind: GGMLQuantizationType, llama: PreTrainedModel, tmp_path: Path
) -> None:
    checkpoint = load(write_gguf(llama, tmp_path / "m.gguf", "llama", matrices=kind), torch.bfloat16)

    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        original = llama.state_dict()[name]
        expected = torch.from_numpy(dequantize(quantize(original.numpy(), kind), kind).astype(np.float32))
        assert torch.equal(checkpoint.weights[name], expected.bfloat16()), name
        assert torch.allclose(checkpoint.weights[name].float(), original, atol=0.06)


def test_tensor_larger_than_a_chunk_is_read_whole(
    llama: PreTrainedModel, llama_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.weights.gguf_model._CHUNK_ELEMENTS", 1000)

    embedding = load(llama_file).weights["model.embed_tokens.weight"]

    assert torch.equal(embedding, llama.state_dict()["model.embed_tokens.weight"])


def test_llama3_scaling_is_recovered_from_its_factors(llama: PreTrainedModel, tmp_path: Path) -> None:
    scaling = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    factors = llama3_factors(scaling, 10000.0, 16).astype(np.float32)

    checkpoint = load(write_gguf(llama, tmp_path / "m.gguf", "llama", extra={"rope_freqs.weight": factors}))

    assert checkpoint.config.rope_scaling == scaling


def test_unknown_rope_factors_are_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = write_gguf(
        llama, tmp_path / "m.gguf", "llama", extra={"rope_freqs.weight": np.full(8, 3.0, dtype=np.float32)}
    )

    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        load(path)


def test_unsupported_architecture_names_the_supported_ones(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf", "falcon")

    with pytest.raises(ModelFileError, match="'falcon' is not supported; supported: llama, qwen2, qwen3"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.causal", False),
        ("attention.scale", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("rope.scaling.type", "yarn"),
    ],
)
def test_keys_that_change_the_arithmetic_are_refused(
    key: str, value: object, llama: PreTrainedModel, tmp_path: Path
) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf", "llama", keys={f"llama.{key}": value})

    with pytest.raises(
        ModelFileError, match="scaling 'yarn'" if value == "yarn" else rf"llama\.{key} is {value}"
    ):
        load(path)


@pytest.mark.parametrize("family", ["llama_tied", "mistral_window", "llama_linear_rope", "qwen2", "qwen3"])
def test_file_generates_what_transformers_generates(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    path = write_gguf(model, tmp_path / "m.gguf", ARCHITECTURES.get(family, "llama"), keys=_keys_of(model))
    prompts = [[5, 6, 7], list(range(3, 60))]
    options = runner_options(str(path), device="cpu", dtype="float32", kv_cache_bytes=1 << 21, num_threads=1)

    tokens = tokens_of(generate(load_runner(options), prompts, 16, chunk_tokens=9))

    assert tokens == {str(idx): reference_tokens(model, prompt, 16) for idx, prompt in enumerate(prompts)}


def _keys_of(model: PreTrainedModel) -> dict[str, object]:
    """The keys that writers add for windows and scaled rotation."""
    rope, window = model.config.rope_parameters, getattr(model.config, "sliding_window", None)
    keys: dict[str, object] = {} if window is None else {"llama.attention.sliding_window": window}
    if rope["rope_type"] == "linear":
        keys |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": rope["factor"]}
    return keys


def test_unsupported_quantization_names_tensor_and_type(llama_file: Path, tmp_path: Path) -> None:
    raw = bytearray(llama_file.read_bytes())
    at = raw.index(b"blk.0.attn_k.weight") + len("blk.0.attn_k.weight") + 4 + 2 * 8
    raw[at : at + 4] = struct.pack("<I", GGMLQuantizationType.TQ1_0)
    (tmp_path / "m.gguf").write_bytes(raw)

    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_k\.weight has type TQ1_0; supported: F32"):
        load(tmp_path / "m.gguf")


def test_unknown_tensor_is_refused_not_ignored(llama: PreTrainedModel, tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.zeros(96, dtype=np.float32)}

    with pytest.raises(ModelFileError, match=r"self_attn\.q_proj\.bias"):
        load(write_gguf(llama, tmp_path / "m.gguf", "llama", extra=extra))


def test_file_truncated_anywhere_is_refused(llama_file: Path, tmp_path: Path) -> None:
    raw = llama_file.read_bytes()
    path = tmp_path / "m.gguf"
    for size in (0, 3, 4, 8, 20, 30, 100, 1000, 50_000, len(raw) // 2, len(raw) - 40):
        path.write_bytes(raw[:size])
        with pytest.raises(ModelFileError, match=r"truncated|empty|not a GGUF file"):
            load(path)


@pytest.mark.parametrize(
    ("at", "value"),
    [(4, b"\x09\x00\x00\x00"), (8, b"\xff" * 8), (16, b"\xff" * 8), (24, b"\xff" * 8), (0, b"GGML")],
)
def test_header_with_absurd_numbers_is_refused(
    at: int, value: bytes, llama_file: Path, tmp_path: Path
) -> None:
    raw = bytearray(llama_file.read_bytes())
    raw[at : at + len(value)] = value
    (tmp_path / "m.gguf").write_bytes(raw)

    with pytest.raises(ModelFileError):
        load(tmp_path / "m.gguf")


@pytest.mark.model
def test_smollm2_opens() -> None:
    checkpoint = open_checkpoint(resolve_model("smollm2-135m-instruct"), torch.bfloat16)

    assert checkpoint.config.num_layers == 30
    assert checkpoint.config.eos_token_ids == (2,)
    assert checkpoint.weights["model.layers.3.self_attn.k_proj.weight"].shape == (192, 576)
