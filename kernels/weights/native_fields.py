"""Which configs of the native families the native decoders can compute. Others run through transformers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kernels.model_config import MAX_LAYERS

_WINDOWS = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _WINDOWS | {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "qwen3": _WINDOWS | {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
}
"""transformers' defaults for fields that a config omits. Gemma 3 has its own table."""

NATIVE_ROPE_TYPES = ("default", "linear", "llama3")
_ACTIVATIONS = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("gelu_pytorch_tanh",),
}
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "llama": ("hidden_act", "attention_bias", "mlp_bias"),
    "mistral": ("hidden_act",),
    "qwen2": ("hidden_act",),
    "qwen3": ("hidden_act", "attention_bias"),
    "gemma3_text": (
        *("hidden_activation", "attention_bias", "use_bidirectional_attention"),
        *("attn_logit_softcapping", "final_logit_softcapping"),
    ),
}
"""Fields of each family's config that transformers reads and of which the native decoders support one value."""


def foreign_field(raw: Mapping[str, Any]) -> str | None:
    """Return the first field, with its value, that the native decoders do not support; None if they support all.

    `raw` is a config.json, for Gemma 3 its text part. The reader of a field checks its type.
    """
    if not is_family(raw):
        return f"model_type is {raw.get('model_type')!r:.100}"
    return next(_foreign_fields(raw["model_type"], raw), None)


def is_family(raw: Mapping[str, Any]) -> bool:
    """Return whether the model type is native, whatever else the config asks for."""
    return isinstance(raw.get("model_type"), str) and raw["model_type"] in _FIELDS


def with_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with defaults filled in, for families other than Gemma 3."""
    return {**DEFAULTS[raw["model_type"]], **raw}


def _foreign_fields(model_type: str, raw: Mapping[str, Any]) -> Iterator[str]:
    for name in (*_FIELDS[model_type], "is_causal"):
        value = raw.get(name)
        if value is not None and not _known(name)(value):
            yield f"{name} is {value!r:.100}"
    if model_type == "gemma3_text":
        yield from _foreign_gemma3_rope(raw)
    else:
        yield from _foreign_rope(
            "rope_parameters", raw.get("rope_scaling") or raw.get("rope_parameters"), raw
        )
    if model_type in ("qwen2", "qwen3"):
        yield from _mixed_windows(raw)
    if model_type == "llama":
        yield from _stray_window(raw)


def _known(name: str) -> Callable[[Any], bool]:
    if name in _ACTIVATIONS:
        return lambda value: value in _ACTIVATIONS[name]
    return bool if name == "is_causal" else lambda value: not value


def _foreign_rope(name: str, parameters: Any, raw: Mapping[str, Any]) -> Iterator[str]:
    found = parameters if isinstance(parameters, dict) else {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in (*NATIVE_ROPE_TYPES, None):
        yield f"{name} has rope_type {kind!r:.100}"
    partial = found.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        yield f"partial_rotary_factor is {partial!r:.100}"


def _foreign_gemma3_rope(raw: Mapping[str, Any]) -> Iterator[str]:
    """Rotations differ by kind of layer; transformers 4 wrote only that of full attention, as rope_scaling."""
    parameters = raw.get("rope_parameters")
    by_kind = parameters if isinstance(parameters, dict) else {}
    yield from _foreign_rope("rope_parameters", raw.get("rope_scaling") or by_kind.get("full_attention"), raw)
    local = by_kind.get("sliding_attention")
    kind = local.get("rope_type", "default") if isinstance(local, dict) else "default"
    if kind != "default":
        yield f"rope_parameters of layers with a window has rope_type {kind!r:.100}"


def _mixed_windows(raw: Mapping[str, Any]) -> Iterator[str]:
    kinds = qwen_layer_types(raw)
    if kinds not in ([kind] * len(kinds) for kind in ("full_attention", "sliding_attention")):
        yield f"layer_types is {kinds!r:.100}"
    elif "sliding_attention" in kinds and uniform_window(raw) is None:
        yield "layer_types names windows that use_sliding_window switches off"


def _stray_window(raw: Mapping[str, Any]) -> Iterator[str]:
    """Llama has no windows, but the cache that transformers makes for it would apply one."""
    window, longest = raw.get("sliding_window"), with_defaults(raw)["max_position_embeddings"]
    reaches_all = isinstance(window, int) and isinstance(longest, int) and window >= longest
    if window is not None and not reaches_all and raw.get("use_sliding_window", True):
        yield f"sliding_window is {window!r:.100}"


def qwen_layer_types(raw: Mapping[str, Any]) -> list[Any]:
    """The kinds of layers; derived as in transformers if the config does not give them."""
    if raw.get("layer_types") is not None:
        return list(raw["layer_types"]) if isinstance(raw["layer_types"], list) else [raw["layer_types"]]
    full = with_defaults(raw)
    first, num_layers = full["max_window_layers"], full.get("num_hidden_layers")
    if not isinstance(num_layers, int) or num_layers > MAX_LAYERS or not isinstance(first, int):
        return ["full_attention"]  # The reader of the number of layers reports what is wrong with it.
    has_window = full["use_sliding_window"] and full["sliding_window"] is not None
    return [
        "sliding_attention" if has_window and layer >= first else "full_attention"
        for layer in range(num_layers)
    ]


def uniform_window(raw: Mapping[str, Any]) -> Any:
    """Return the sliding_window of a config without foreign fields, None if no layer has one; its type is unchecked."""
    if raw["model_type"] == "mistral":
        return with_defaults(raw)["sliding_window"]
    if raw["model_type"] not in ("qwen2", "qwen3"):
        return None  # Llama has none, whatever its config says
    full = with_defaults(raw)
    has_window = full["use_sliding_window"] and "sliding_attention" in qwen_layer_types(raw)
    return full["sliding_window"] if has_window else None
