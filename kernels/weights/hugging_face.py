"""config.json and generation_config.json of a Hugging Face folder, as transformers 4 and 5 write them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.errors import ModelFileError
from kernels.model_config import MAX_LAYERS, ModelConfig, RopeScaling
from kernels.weights import gemma3_config, native_fields

_MAX_CONFIG_BYTES = 1 << 20
_MAX_SIZE = (1 << 31) - 1
"""Of every size: rows and columns are int32 on the device."""


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig:
    """A config.json that is valid JSON."""

    path: Path
    raw: dict[str, Any]
    """Only the text part for a Gemma 3 that also reads images."""

    @property
    def foreign_field(self) -> str | None:
        """Why the native decoders cannot compute this model, in words; None if they can."""
        return native_fields.foreign_field(self.raw)

    @property
    def is_native_family(self) -> bool:
        return native_fields.is_family(self.raw)


def open_config(folder: Path) -> HuggingFaceConfig:
    """Read config.json. Raises ModelFileError if it is unreadable."""
    path = folder / "config.json"
    raw = _read_json(path)
    return HuggingFaceConfig(
        path, gemma3_config.text_part(path, raw) if raw.get("model_type") == "gemma3" else raw
    )


def read_config(folder: Path) -> ModelConfig:
    """Read the config. Raises ModelFileError naming a field that is missing, malformed or not supported natively."""
    opened = open_config(folder)
    path, raw = opened.path, opened.raw
    if opened.foreign_field is not None:
        raise ModelFileError(f"{path}: {opened.foreign_field}, which the native decoders do not compute")
    _refuse_quantized(path, raw)
    is_gemma3 = raw["model_type"] == "gemma3_text"
    raw = gemma3_config.with_defaults(path, raw) if is_gemma3 else native_fields.with_defaults(raw)
    model_type: str = "gemma3" if is_gemma3 else raw["model_type"]
    hidden_size, num_heads = _integer(path, raw, "hidden_size"), _integer(path, raw, "num_attention_heads")
    rope_theta, rope_scaling = _rope(path, raw)
    config = ModelConfig(
        model_type=model_type,
        num_layers=_integer(path, raw, "num_hidden_layers", limit=MAX_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=_integer(path, raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_integer(path, raw, "num_key_value_heads", default=num_heads),
        head_dim=_integer(path, raw, "head_dim", default=hidden_size // num_heads),
        vocab_size=_integer(path, raw, "vocab_size"),
        max_position_embeddings=_integer(path, raw, "max_position_embeddings"),
        rms_norm_eps=_number(path, raw, "rms_norm_eps", default=1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2",
        eos_token_ids=read_eos_token_ids(folder),
        bos_token_id=_bos_token_id(path, raw),
        **(gemma3_config.read_fields(path, raw) if is_gemma3 else _other_fields(path, raw)),
    )
    check_heads(path, config)
    return config


def check_heads(path: Path, config: ModelConfig) -> None:
    """Raises ModelFileError if heads cannot be grouped evenly or a head has an odd size."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{path}: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelFileError(f"{path}: head_dim {config.head_dim} is odd; rotary embedding needs pairs")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > _MAX_CONFIG_BYTES:
            raise ModelFileError(f"{path} has {size} bytes; the limit is {_MAX_CONFIG_BYTES}")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelFileError(f"{path} holds a {type(raw).__name__}; it must be an object")
    return raw


def _refuse_quantized(path: Path, raw: dict[str, Any]) -> None:
    found = raw.get("quantization_config")
    if found:
        method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
        raise ModelFileError(
            f"{path}: quantization_config ({method!s:.100}) is not supported; "
            "give an unquantized checkpoint or a GGUF file"
        )


def _integer(
    path: Path, raw: dict[str, Any], name: str, *, default: int | None = None, limit: int = _MAX_SIZE
) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFileError(f"{path}: {name} is {value!r:.100}; it must be a positive integer")
    if value > limit:
        raise ModelFileError(f"{path}: {name} is {value!r:.100}; the limit is {limit}")
    return value


def _number(path: Path, raw: dict[str, Any], name: str, *, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None:
        value = default
    if not gemma3_config.is_positive(value):
        raise ModelFileError(f"{path}: {name} is {value!r:.100}; it must be a positive number")
    return float(value)


def _bos_token_id(path: Path, raw: dict[str, Any]) -> int | None:
    value = raw.get("bos_token_id")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ModelFileError(f"{path}: bos_token_id is {value!r:.100}; it must be an id")
    return value


def _rope(path: Path, raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """transformers 5 writes rope_parameters; 4 wrote rope_theta and an optional rope_scaling, which wins."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ModelFileError(f"{path}: rope_parameters must be an object, not {type(parameters).__name__}")
    theta = _number(path, {**raw, **parameters}, "rope_theta", default=10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("default", None):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _number(path, parameters, "factor"))
    assert kind == "llama3", "other kinds are foreign"
    return theta, RopeScaling(
        kind="llama3",
        factor=_number(path, parameters, "factor"),
        low_freq_factor=_number(path, parameters, "low_freq_factor"),
        high_freq_factor=_number(path, parameters, "high_freq_factor"),
        original_max_position_embeddings=_integer(
            path,
            parameters,
            "original_max_position_embeddings",
            default=_integer(path, raw, "max_position_embeddings"),
        ),
    )


def _other_fields(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig that are read differently for Gemma 3."""
    fields: dict[str, Any] = {"qk_norm": raw["model_type"] == "qwen3"}
    if native_fields.uniform_window(raw) is not None:
        fields["layer_windows"] = (_integer(path, raw, "sliding_window"),) * _integer(
            path, raw, "num_hidden_layers", limit=MAX_LAYERS
        )
    return fields


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids of generation_config.json first, then those that only config.json has.

    Raises ModelFileError if a file is unreadable or eos_token_id is neither an id nor a list of ids.
    """
    sources = [_read_json(folder / "config.json")]
    if (folder / "generation_config.json").is_file():
        sources.insert(0, _read_json(folder / "generation_config.json"))
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in found):
            raise ModelFileError(
                f"{folder}: eos_token_id is {value!r:.100}; it must be an id or a list of ids"
            )
        ids.extend(token_id for token_id in found if token_id not in ids)
    return tuple(ids)
