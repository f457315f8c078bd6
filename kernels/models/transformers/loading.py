"""Loads a transformers model for the adapter, and refuses what the adapter would compute wrongly."""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kernels.errors import ModelFileError
from kernels.model_config import ModelConfig
from kernels.models.transformers.adapter import AdapterModel, Span
from kernels.models.transformers.check import BLOCK_SIZE, NUM_BLOCKS, check_logits, own_logits
from kernels.models.transformers.probe import FAR, LayerNeeds, probe_layers
from kernels.models.transformers.quiet import quiet_transformers
from kernels.runtime.kv_pool import KVPool
from kernels.weights.hugging_face import read_eos_token_ids

log = logging.getLogger(__name__)

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_HEAD_MULTIPLE = 4
"""The pool's head size is a multiple of this for every type."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A model that has passed every check, before there is a pool of its shape."""

    config: ModelConfig
    model: PreTrainedModel
    spans: tuple[Span, ...]

    def bind(self, kv_pool: KVPool) -> AdapterModel:
        return AdapterModel(self.config, self.model, self.spans, kv_pool)


def load_adapter(folder: Path, dtype: torch.dtype, device: torch.device) -> LoadedAdapter:
    """Load a model from local files only, without running code of the checkpoint.

    Raises ModelFileError for a model whose layers are not all causal softmax attention, or whose logits are not
    those of its own attention: a small mixed batch is computed both ways.
    """
    with quiet_transformers(logging.ERROR):  # the checks here report what matters
        return _load_checked(folder, dtype, device)


def _load_checked(folder: Path, dtype: torch.dtype, device: torch.device) -> LoadedAdapter:
    with _refusing(folder, "cannot load the model"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    _check_architecture(folder, config)
    model = _load(folder, config, dtype)
    torch.nn.Module.to(model, device)  # transformers' own is typed for a decorator
    max_positions = _max_positions(config.get_text_config())
    with _refusing(folder, f"cannot run {type(model).__name__}"):
        expected = own_logits(model, max_positions)
        layers = probe_layers(folder, model)
    _check_layers(folder, model, layers)
    loaded = LoadedAdapter(
        _model_config(folder, config, layers, max_positions=max_positions, vocab_size=expected.shape[-1]),
        model,
        tuple(layer.span for layer in layers),
    )
    pool = KVPool(loaded.config, NUM_BLOCKS, BLOCK_SIZE, model.dtype, model.device)
    check_logits(folder, loaded.bind(pool), model, expected)
    return loaded


@contextmanager
def _refusing(folder: Path, what: str) -> Iterator[None]:
    """Turn anything that transformers raises on files it does not understand into a ModelFileError."""
    try:
        yield
    except ModelFileError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelFileError(f"{folder}: transformers {what}: {reason:.500}") from error


def _check_architecture(folder: Path, config: Any) -> None:
    """Refuse what the config and the class rule out before any weight is read."""
    if type(config) not in AutoModelForCausalLM._model_mapping or config.is_encoder_decoder:
        raise ModelFileError(
            f"{folder}: model_type {config.model_type!r} is no decoder-only causal language model of transformers"
        )
    if getattr(config, "quantization_config", None):
        raise ModelFileError(
            f"{folder}: quantization_config is not supported; give an unquantized checkpoint or a GGUF file"
        )
    architecture: Any = AutoModelForCausalLM._model_mapping[type(config)]
    name, text = architecture.__name__, config.get_text_config()
    others = sorted(
        str(kind) for kind in set(getattr(text, "layer_types", None) or ()).difference(_LAYER_TYPES)
    )
    if architecture._is_stateful or others:
        listed = f" (layer_types: {', '.join(others)})" if others else ""
        what = "keeps recurrent state" if architecture._is_stateful else "has more than attention layers"
        raise ModelFileError(
            f"{folder}: {name} {what}{listed}; supported are "
            f"models whose layers are all {', '.join(_LAYER_TYPES)}"
        )
    if "position_ids" not in inspect.signature(architecture.forward).parameters:
        raise ModelFileError(f"{folder}: {name} takes no position_ids, so rows cannot share a batch")
    if getattr(text, "attn_temperature_tuning", None):
        raise ModelFileError(
            f"{folder}: attn_temperature_tuning is {text.attn_temperature_tuning!r}; {name} scales by the place in "
            "the batch, not by the position, so rows cannot share one"
        )


def _load(folder: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    with _refusing(folder, "cannot load the model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",  # This is the only one that every model has and that is complete.
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    model, report = loaded
    lacking = sorted(report["missing_keys"]) + sorted(str(entry[0]) for entry in report["mismatched_keys"])
    if lacking:
        raise ModelFileError(
            f"{folder}: {len(lacking)} tensors of the model are missing or misshapen: {', '.join(lacking[:5])}"
        )
    extra = sorted(report["unexpected_keys"])
    if extra:
        log.warning("%s: %d tensors have no place in the model: %s", folder, len(extra), ", ".join(extra[:5]))
    ready: PreTrainedModel = model.eval()
    return ready


def _check_layers(folder: Path, model: PreTrainedModel, layers: Sequence[LayerNeeds]) -> None:
    text = model.config.get_text_config()
    num_layers: int = text.num_hidden_layers
    if len(layers) < num_layers:
        raise ModelFileError(
            f"{folder}: {len(layers)} of the {num_layers} layers of {type(model).__name__} use transformers' attention "
            "interface; all must (state-space, linear and hand-written attention layers are not supported)"
        )
    for idx, kind in enumerate(_declared_kinds(text, len(layers))):
        if kind != "full_attention" and layers[idx].span == Span():
            raise ModelFileError(
                f"{folder}: layer {idx} has {kind} that {type(model).__name__} does not put into its mask; "
                "not supported"
            )


def _declared_kinds(text: Any, num_calls: int) -> list[str]:
    """The kinds of attention that the config declares; a mask that was never built would look like full attention."""
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return list(kinds)[:num_calls]
    declared = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return ["sliding_attention" if declared else "full_attention"] * num_calls


def _model_config(
    folder: Path, config: Any, layers: Sequence[LayerNeeds], *, max_positions: int, vocab_size: int
) -> ModelConfig:
    text = config.get_text_config()
    head_dim = max(layer.head_dim for layer in layers)
    return ModelConfig(
        model_type=config.model_type,
        num_layers=len(layers),
        hidden_size=getattr(text, "hidden_size", 0),
        intermediate_size=0,  # This is unused, like everything that is zero below: transformers computes it.
        num_heads=getattr(text, "num_attention_heads", 0),
        num_kv_heads=max(layer.num_kv_heads for layer in layers),
        head_dim=-(-head_dim // _HEAD_MULTIPLE) * _HEAD_MULTIPLE,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        rms_norm_eps=0.0,
        rope_theta=0.0,
        eos_token_ids=read_eos_token_ids(folder),
        bos_token_id=getattr(text, "bos_token_id", None),
    )


def _max_positions(text: Any) -> int:
    """The largest number of positions for which the rotation does not depend on the longest row of the batch."""
    limit: int = min(getattr(text, "max_position_embeddings", None) or FAR, FAR)
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings")
            limit = min(limit, original or getattr(text, "original_max_position_embeddings", None) or limit)
    return limit
