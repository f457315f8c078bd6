"""Gemma 3's fields of a config.json, as transformers 4 and 5 write them."""

import sys
from pathlib import Path
from typing import Any, TypeGuard

from kernels.errors import ModelFileError

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""transformers' defaults. It writes only fields that differ from them, and published configs omit many."""

_PATTERN = 6
_KINDS = ("sliding_attention", "full_attention")


def with_defaults(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the text part with all defaults filled in and the rotary fields of full attention at the top level."""
    full = _DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    parameters = _object(path, full, "rope_parameters")
    local = _object(path, parameters, "sliding_attention")
    full["rope_local_base_freq"] = local.get("rope_theta", full["rope_local_base_freq"])
    full["rope_parameters"] = {
        **_object(path, parameters, "full_attention"),
        **_object(path, full, "rope_scaling"),
    }
    full["rope_scaling"] = None
    return full


def _object(path: Path, raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: {name} must be an object, not {type(value).__name__}")
    return value


def text_part(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a model that also reads images; text runs the same without them.

    Raises ModelFileError if text_config is no object.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ModelFileError(f"{path}: text_config is {text!r:.100}; it must be an object")
    outer = {name: raw[name] for name in ("bos_token_id", "tie_word_embeddings") if raw.get(name) is not None}
    return {**text, **outer, "model_type": "gemma3_text"}


def read_fields(path: Path, full: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelConfig that only Gemma 3 has, from what `with_defaults` gives.

    Raises ModelFileError for a field that is not a positive number.
    """
    values = {
        name: full[name] for name in ("sliding_window", "rope_local_base_freq", "query_pre_attn_scalar")
    }
    for name, value in values.items():
        if not is_positive(value):
            raise ModelFileError(f"{path}: {name} is {value!r:.100}; it must be a positive number")
    window = max(1, int(values["sliding_window"]))
    windows = tuple(window if kind == "sliding_attention" else None for kind in _layer_types(path, full))
    return family_fields(full["hidden_size"]) | {
        "layer_windows": windows,
        "local_rope_theta": float(values["rope_local_base_freq"]),
        "attention_scale": float(values["query_pre_attn_scalar"]) ** -0.5,
    }


def is_positive(value: Any) -> TypeGuard[int | float]:
    """Tell whether a value is a positive number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def family_fields(hidden_size: int) -> dict[str, Any]:
    """Return the fields of ModelConfig that follow from the family."""
    return {
        "qk_norm": True,
        "embedding_scale": hidden_size**0.5,
        "activation": "gelu_tanh",
        "has_post_norms": True,
        "has_float32_norms": True,
    }


def _layer_types(path: Path, full: dict[str, Any]) -> list[str]:
    num_layers = full["num_hidden_layers"]
    kinds = full.get("layer_types")
    if kinds is None:
        period = full.get("sliding_window_pattern", full.get("_sliding_window_pattern", _PATTERN))
        if isinstance(period, bool) or not isinstance(period, int) or period < 1:
            raise ModelFileError(
                f"{path}: sliding_window_pattern is {period!r}; it must be a positive integer"
            )
        return [_KINDS[(layer + 1) % period == 0] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise ModelFileError(
            f"{path}: layer_types must name {num_layers} layers, each one of {', '.join(_KINDS)}; it is {kinds!r:.200}"
        )
    return kinds
