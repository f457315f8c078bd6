"""A decoder's weights as the compiled step reads them: packed matrices, and a LAYER record per layer."""

from collections.abc import Mapping

import numpy as np
import torch

from kernels.memory import Arena
from kernels.model_config import ModelConfig
from kernels.models.cpu.step_layout import LAYER
from kernels.models.decoder_weights import DecoderWeights, LayerWeights
from kernels.models.rope import RotaryTables
from kernels.ops.linear.cpu import describe
from kernels.ops.linear.packing import PackedLinear, pack_gate_up, pack_linear


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """The number of keys that each layer sees, the token's own included; 0 for all."""
    return tuple(config.window(idx) or 0 for idx in range(config.num_layers))


class PackedWeights:
    """Owns all memory that `layers` and `linears` refer to by address.

    All fields of `layers` are set except `work`, which the decoder sets.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], *, quantized: bool) -> None:
        """weights: by Hugging Face name, matrices [num_outputs, num_inputs], norms and biases [size]."""
        self._config = config
        self._quantized = quantized
        self._arena = Arena()
        self._packed: list[PackedLinear] = []
        self._norms: list[torch.Tensor] = []
        self._rotary = RotaryTables(config, config.max_position_embeddings)
        source = DecoderWeights(config, weights)
        self.layers = np.zeros(config.num_layers, LAYER)
        for idx in range(config.num_layers):
            self._load_layer(source.layer(idx), idx)
        embedding = source.embedding()
        self._packed.append(self._pack(source.head(embedding)))
        self.embedding = embedding.to(torch.bfloat16).contiguous()
        self.final_norm = self._norm(source.final_norm())
        self.linears = np.array([describe(linear) for linear in self._packed], np.int64)

    @property
    def most_groups(self) -> int:
        """The largest number of activation scales that a row needs."""
        return max(linear.num_groups for linear in self._packed)

    def _norm(self, weight: torch.Tensor) -> int:
        self._norms.append(weight.float().contiguous())
        return self._norms[-1].data_ptr()

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return pack_linear(weight, bias, quantized=self._quantized, arena=self._arena)

    def _load_layer(self, layer: LayerWeights, idx: int) -> None:
        self._packed += [
            self._pack(layer.qkv(), layer.qkv_bias()),
            self._pack(layer.out()),
            pack_gate_up(layer.gate(), layer.up(), quantized=self._quantized, arena=self._arena),
            self._pack(layer.down()),
        ]
        for role, weight in layer.norms().items():
            self.layers[idx][role] = self._norm(weight)
        cos, sin = self._rotary.of(idx)
        self.layers["cos"][idx], self.layers["sin"][idx] = cos.data_ptr(), sin.data_ptr()
        self.layers["window"][idx] = self._config.window(idx) or 0
