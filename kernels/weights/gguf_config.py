"""Converts GGUF metadata to a ModelConfig."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.errors import ModelFileError
from kernels.model_config import MAX_LAYERS, ModelConfig, RopeScaling
from kernels.weights import gemma3_config
from kernels.weights.gguf_file import GgufFile
from kernels.weights.hugging_face import check_heads

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_config(file: GgufFile, rope_factors: npt.NDArray[np.float32] | None) -> ModelConfig:
    """Read the config. rope_factors: rope_freqs.weight [head_dim / 2], into which converters bake Llama 3's scaling.

    Raises ModelFileError naming the key that is missing, malformed or unsupported.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in SUPPORTED_ARCHITECTURES or not isinstance(arch, str):
        raise ModelFileError(
            f"{file.path}: architecture {arch!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    keys = _Keys(file, arch)
    _refuse_other_arithmetic(keys)
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, head_dim) != head_dim:
            raise ModelFileError(
                f"{file.path}: {arch}.{name} is {keys.integer(name)}; "
                f"only the head size, {head_dim}, is supported"
            )
    config = ModelConfig(
        model_type=arch,
        num_layers=keys.num_layers(),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(file),
        max_position_embeddings=keys.integer("context_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(keys, head_dim, rope_factors),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=arch == "qwen2",
        eos_token_ids=_eos_token_ids(file),
        bos_token_id=_token_id(file, "tokenizer.ggml.bos_token_id"),
        **(_gemma3_fields(keys) if arch == "gemma3" else _other_fields(keys)),
    )
    check_heads(file.path, config)
    return config


_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "rope.scaling.attn_factor": (0.0, 1.0),
}
"""Keys that would change the arithmetic, and the values with which they do not."""


def _refuse_other_arithmetic(keys: "_Keys") -> None:
    for name, neutral in _NEUTRAL.items():
        value = keys.file.metadata.get(f"{keys.arch}.{name}", neutral[0])
        if value not in neutral:
            raise ModelFileError(
                f"{keys.file.path}: {keys.arch}.{name} is {value!r:.100}, which is not supported"
            )


class _Keys:
    """Typed access to the keys of one architecture."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file = file
        self.arch = arch

    def number(self, name: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.arch}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelFileError(
                f"{self.file.path}: {self.arch}.{name} is {value!r:.100}; it must be a positive number"
            )
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise ModelFileError(f"{self.file.path}: {self.arch}.{name} is {value}; it must be an integer")
        return int(value)

    def num_layers(self) -> int:
        value = self.integer("block_count")
        if value > MAX_LAYERS:
            raise ModelFileError(
                f"{self.file.path}: {self.arch}.block_count is {value}; the limit is {MAX_LAYERS}"
            )
        return value

    def optional_integer(self, name: str) -> int | None:
        value = self.file.metadata.get(f"{self.arch}.{name}")
        return None if value in (None, 0) else self.integer(name)


def _gemma3_fields(keys: _Keys) -> dict[str, Any]:
    """Read the window, which is all that files give; pattern, local theta and the 27B's scale are llama.cpp's."""
    num_layers, num_heads = keys.num_layers(), keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    window, period = (
        keys.integer("attention.sliding_window"),
        keys.integer("attention.sliding_window_pattern", 6),
    )
    per_head = hidden_size // num_heads
    is_27b = num_layers == 62
    return gemma3_config.family_fields(hidden_size) | {
        "layer_windows": tuple(window if (layer + 1) % period else None for layer in range(num_layers)),
        "local_rope_theta": keys.number("rope.freq_base_swa", 10000.0),
        "attention_scale": (per_head if is_27b else keys.integer("attention.key_length", per_head)) ** -0.5,
    }


def _other_fields(keys: _Keys) -> dict[str, Any]:
    fields: dict[str, Any] = {"qk_norm": keys.arch == "qwen3"}
    window = keys.optional_integer("attention.sliding_window")
    if window is not None:
        fields["layer_windows"] = (window,) * keys.num_layers()
    return fields


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.dims) != 2:
        raise ModelFileError(f"{file.path}: tensor token_embd.weight is missing or no matrix")
    return embedding.dims[1]


def _token_id(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    found = [_token_id(file, key) for key in _EOS_KEYS]
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _rope_scaling(
    keys: _Keys, head_dim: int, rope_factors: npt.NDArray[np.float32] | None
) -> RopeScaling | None:
    kind = keys.file.metadata.get(f"{keys.arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelFileError(
            f"{keys.file.path}: rope scaling {kind!r} is not supported; supported: none, linear, llama3"
        )
    if rope_factors is not None:
        return _llama3_scaling(keys, head_dim, rope_factors)
    factor = keys.number("rope.scaling.factor", 1.0)
    return RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None


def _llama3_scaling(keys: _Keys, head_dim: int, found: npt.NDArray[np.float32]) -> RopeScaling:
    """Recover the parameters that the factors were computed from, trying those of the published Llama 3.x models."""
    usable = found.shape == (head_dim // 2,) and bool(np.isfinite(found).all()) and found.min() > 0
    for original in (8192, 4096, 2048) if usable else ():
        scaling = RopeScaling("llama3", float(found.max()), 1.0, 4.0, original)
        with np.errstate(all="ignore"):  # a base near zero or infinity, whose factors are none of these
            expected = llama3_factors(scaling, keys.number("rope.freq_base", 10000.0), head_dim)
        if np.allclose(found, expected, rtol=1e-3):
            return scaling
    raise ModelFileError(
        f"{keys.file.path}: the factors in rope_freqs.weight are not those of Llama 3's scaling"
    )


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """Return [head_dim / 2] float64: the divisor of each frequency (the Llama 3.1 release's formula)."""
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / scaling.factor + smooth))
