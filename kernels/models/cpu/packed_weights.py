"""A decoder's weights as the compiled step reads them: packed matrices, and of each layer a LAYER record."""

from collections.abc import Mapping

import numpy as np
import torch

from kernels.config import ModelConfig
from kernels.memory import Arena
from kernels.models.cpu.step_layout import LAYER
from kernels.models.rope import rotary_tables
from kernels.ops.linear.cpu import describe
from kernels.ops.linear.packing import PackedLinear, pack_gate_up, pack_linear

_PROJECTIONS = "qkv"
_NORM_FIELDS = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
_GEMMA3_NORM_FIELDS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "attended_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "fed_norm",
}
_HEAD_NORM_FIELDS = {"self_attn.q_norm": "query_norm", "self_attn.k_norm": "key_norm"}


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """Keys that each layer looks back over, its token's own included; 0 for all."""
    if config.gemma3 is None:
        return (config.sliding_window or 0,) * config.num_layers
    return tuple(window or 0 for window in config.gemma3.layer_windows)


class PackedWeights:
    """Owns all memory that `layers` and `linears` name by address.

    Of `layers` everything is filled in but `work`, which belongs to the steps.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], *, quantized: bool) -> None:
        self._config = config
        self._quantized = quantized
        self._arena = Arena()
        self._packed: list[PackedLinear] = []
        self._norms: list[torch.Tensor] = []
        self._tables = rotary_tables(config, config.max_position_embeddings)
        self._local_tables = self._tables
        if config.gemma3 is not None:
            self._local_tables = rotary_tables(
                config, config.max_position_embeddings, config.gemma3.local_rope_theta
            )
        self.layers = np.zeros(config.num_layers, LAYER)
        for index in range(config.num_layers):
            self._load_layer(weights, index)
        embedding = weights["model.embed_tokens.weight"]
        self._packed.append(
            self._pack(embedding if config.tie_word_embeddings else weights["lm_head.weight"])
        )
        self.embedding = embedding.to(torch.bfloat16).contiguous()
        self.final_norm = self._norm(weights["model.norm.weight"])
        self.linears = np.array([describe(linear) for linear in self._packed], np.int64)

    @property
    def most_groups(self) -> int:
        """Activation scales that a row needs at most."""
        return max(linear.num_groups for linear in self._packed)

    @property
    def embedding_scale(self) -> float:
        """Factor of an embedding, rounded to the model's type as in training: Gemma 3's 640 ** 0.5 is 25.25."""
        if self._config.gemma3 is None:
            return 1.0
        return float(torch.tensor(self._config.hidden_size**0.5, dtype=torch.bfloat16))

    def _norm(self, weight: torch.Tensor) -> int:
        self._norms.append(weight.float().contiguous())
        return self._norms[-1].data_ptr()

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return pack_linear(weight, bias, quantized=self._quantized, arena=self._arena)

    def _load_layer(self, weights: Mapping[str, torch.Tensor], index: int) -> None:
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        qkv = torch.cat([weights[f"{attention}{name}_proj.weight"] for name in _PROJECTIONS])
        bias = None
        if self._config.qkv_bias:
            bias = torch.cat([weights[f"{attention}{name}_proj.bias"] for name in _PROJECTIONS])
        self._packed += [
            self._pack(qkv, bias),
            self._pack(weights[attention + "o_proj.weight"]),
            pack_gate_up(
                weights[prefix + "mlp.gate_proj.weight"],
                weights[prefix + "mlp.up_proj.weight"],
                quantized=self._quantized,
                arena=self._arena,
            ),
            self._pack(weights[prefix + "mlp.down_proj.weight"]),
        ]
        for name, field in self._norm_fields().items():
            self.layers[index][field] = self._norm(weights[f"{prefix}{name}.weight"])
        window = layer_windows(self._config)[index]
        cos, sin = self._local_tables if window else self._tables
        self.layers["cos"][index], self.layers["sin"][index] = cos.data_ptr(), sin.data_ptr()
        self.layers["window"][index] = window

    def _norm_fields(self) -> Mapping[str, str]:
        """Where a layer's norm weights belong in its record."""
        fields = _NORM_FIELDS if self._config.gemma3 is None else _GEMMA3_NORM_FIELDS
        return fields | _HEAD_NORM_FIELDS if self._config.qk_norm else fields
