"""Writes a transformers model as GGUF, the way llama.cpp's converter lays it out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from transformers import PreTrainedModel

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

_TYPES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    arch: str,
    *,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, npt.NDArray[np.float32]] | None = None,
    keys: Mapping[str, object] | None = None,
) -> Path:
    """`matrices` is the type of every matrix; vectors stay float32, as converters keep them."""
    config: Any = model.config
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    if arch == "gemma3":
        _add_gemma3_keys(writer, config)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_token_list([f"token {idx}" for idx in range(5000)])  # longer than what the reader keeps
    for name, parameter in model.state_dict().items():
        values = parameter.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = _interleave(values, _head_dim(config))
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        kind = matrices if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name, arch), quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    for key, value in (keys or {}).items():
        writer.add_key_value(key, value, _TYPES[type(value)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_gemma3_keys(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_uint32(
        "gemma3.attention.sliding_window_pattern", config.layer_types.index("full_attention") + 1
    )
    writer.add_float32("gemma3.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])


def _gguf_name(name: str, arch: str) -> str:
    names = _GEMMA3_NAMES if arch == "gemma3" else _NAMES
    stem, kind = name.rsplit(".", 1)
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{names[inner]}.{kind}"


def _interleave(values: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Row 2i of a head is its row i, row 2i + 1 its row head_dim / 2 + i."""
    heads = values.reshape(-1, head_dim, values.shape[1])
    mixed = np.empty_like(heads)
    mixed[:, 0::2], mixed[:, 1::2] = heads[:, : head_dim // 2], heads[:, head_dim // 2 :]
    return mixed.reshape(values.shape)
