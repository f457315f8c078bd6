"""The served model as transformers runs it, for comparison. Needs only transformers and torch."""

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from kernels.errors import ModelFileError
from kernels.model_config import ModelConfig, RopeScaling
from kernels.weights.checkpoint import open_checkpoint
from kernels.weights.source import ModelFormat, ModelSource


def load_baseline_model(source: ModelSource, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a model that is ready to generate, without an end of sequence or sampling defaults of its own.

    A folder is read by transformers. Tailrace reads a GGUF file, because transformers would need another package.
    Raises ModelFileError, or what transformers raises for a folder that it cannot read.
    """
    if source.format is ModelFormat.GGUF:
        loaded: Any = _from_gguf(source, dtype)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelFileError(
            f"{source.path}: transformers lacks {len(missing)} tensors: {', '.join(missing[:5])}"
        )
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)  # type: ignore[no-untyped-call]
    ready: PreTrainedModel = model.to(device).eval()
    return ready


def _from_gguf(source: ModelSource, dtype: torch.dtype) -> Any:
    checkpoint = open_checkpoint(source, dtype)
    fields = config_fields(checkpoint.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    state = dict(checkpoint.weights)
    if checkpoint.config.model_type == "gemma3":
        # Our weights are the factors 1 + w; transformers keeps w.
        state = {name: value - 1 if name.endswith("norm.weight") else value for name, value in state.items()}
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """The arguments of transformers' config class for this family, including `model_type`."""
    fields: dict[str, Any] = {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": _rope(config.rope_theta, config.rope_scaling),
        "pad_token_id": None,
    }
    if config.model_type == "gemma3":
        return fields | _gemma3_fields(config)
    window = _only_window(config)
    if config.model_type in ("llama", "mistral"):
        # Llama's class has no window; Mistral's is the same model with one.
        return fields | {"model_type": "llama" if window is None else "mistral", "sliding_window": window}
    if window is not None:
        kinds = ["sliding_attention"] * config.num_layers
        fields |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    return fields


def _gemma3_fields(config: ModelConfig) -> dict[str, Any]:
    assert config.attention_scale is not None
    assert config.local_rope_theta is not None
    return {
        "model_type": "gemma3_text",
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in config.layer_windows
        ],
        "sliding_window": _only_window(config),
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "rope_parameters": {
            "full_attention": _rope(config.rope_theta, config.rope_scaling),
            "sliding_attention": _rope(config.local_rope_theta, None),
        },
    }


def _only_window(config: ModelConfig) -> int | None:
    windows = sorted({window for window in config.layer_windows if window is not None})
    assert len(windows) <= 1, "all formats have one window per model"
    return windows[0] if windows else None


def _rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    parameters = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return parameters
