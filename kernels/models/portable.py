"""The decoder in plain torch operations, for any device and floating-point type. The others are tested against it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.batch import ForwardBatch
from kernels.model_config import ModelConfig
from kernels.models.decoder_weights import DecoderWeights, rounded_embedding_scale
from kernels.models.rope import RotaryTables
from kernels.ops.linear.portable import Linear, make_linear
from kernels.ops.paged_attention.portable import Scores, paged_attention
from kernels.ops.rms_norm.reference import rms_norm_reference
from kernels.ops.rotary.reference import rotary_reference
from kernels.ops.silu_mul.reference import gelu_mul_reference, silu_mul_reference
from kernels.ops.store_kv.reference import store_kv_reference
from kernels.runtime.kv_pool import KVPool

_Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin [num_tokens, head_dim / 2]"""


@dataclass(frozen=True, slots=True)
class _Layer:
    norms: Mapping[str, torch.Tensor]
    """Keyed by role, as in LayerWeights.norms."""
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    scores: Scores


class PortableDecoder:
    """A decoder with its weights, bound to one KV pool. Used by one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        kv_pool: KVPool,
        *,
        dtype: torch.dtype,
        quantized: bool,
    ) -> None:
        """weights: by Hugging Face name: matrices [num_outputs, num_inputs], others [size]; any float type."""
        self.config = config
        self.kv_pool = kv_pool
        device = kv_pool.keys.device
        source = DecoderWeights(config, weights, device, dtype)
        self._embedding = source.embedding()
        self._embedding_scale = rounded_embedding_scale(config, dtype)
        self._final_norm = source.final_norm()
        self._head = make_linear(source.head(self._embedding), quantized=quantized)
        self._layers = [_load_layer(source, idx, quantized) for idx in range(config.num_layers)]
        num_positions = min(config.max_position_embeddings, kv_pool.num_blocks * kv_pool.block_size)
        self._rotary = RotaryTables(config, num_positions, device)
        self._gate = silu_mul_reference if config.activation == "silu" else gelu_mul_reference

    def warmup(self) -> None:
        """Do nothing: no part of this model is compiled."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's K/V into the pool and return the logits [num_sampled, vocab_size] in float32."""
        x = self._embedding[batch.token_ids]
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        rotations = [(cos[batch.positions], sin[batch.positions]) for cos, sin in self._rotary.pairs]
        for idx, layer in enumerate(self._layers):
            norms, rotation = layer.norms, rotations[self._rotary.kinds[idx]]
            attended = layer.out(self._attend(idx, self._normed(x, norms["input_norm"]), rotation, batch))
            x = x + self._branch(attended, norms.get("post_attention_norm"))
            mlp_output = layer.down(self._gate(layer.gate_up(self._normed(x, norms["mlp_norm"]))))
            x = x + self._branch(mlp_output, norms.get("post_mlp_norm"))
        return self._head(self._normed(x[batch.sample_indices], self._final_norm)).float()

    def _attend(self, idx: int, x: torch.Tensor, rotation: _Rotation, batch: ForwardBatch) -> torch.Tensor:
        """Write the K/V of layer `idx` into the pool; return attention's output [num_tokens, num_heads * head_dim]."""
        config, layer = self.config, self._layers[idx]
        heads = layer.qkv(x).view(x.shape[0], -1, config.head_dim)
        query, key, value = heads.tensor_split(
            (config.num_heads, config.num_heads + config.num_kv_heads), dim=1
        )
        if config.qk_norm:
            query = self._normed(query, layer.norms["query_norm"])
            key = self._normed(key, layer.norms["key_norm"])
        keys, values = self.kv_pool.keys[idx], self.kv_pool.values[idx]
        store_kv_reference(rotary_reference(key, *rotation), value, keys, values, batch.slot_mapping)
        query = rotary_reference(query, *rotation)
        return paged_attention(query, keys, values, batch, layer.scores).flatten(1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x, weight, self.config.rms_norm_eps)

    def _branch(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._normed(x, weight)


def _load_layer(source: DecoderWeights, layer_idx: int, quantized: bool) -> _Layer:
    layer, config = source.layer(layer_idx), source.config
    return _Layer(
        norms=layer.norms(),
        qkv=make_linear(layer.qkv(), layer.qkv_bias(), quantized=quantized),
        out=make_linear(layer.out(), quantized=quantized),
        gate_up=make_linear(layer.gate_up(), quantized=quantized),
        down=make_linear(layer.down(), quantized=quantized),
        scores=Scores(config.score_scale, config.window(layer_idx)),
    )
