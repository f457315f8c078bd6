"""Gemma 3 (text) in plain torch operations: any device, any floating-point type."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from kernels.batch import ForwardBatch
from kernels.config import Gemma3Shape, ModelConfig
from kernels.kv_pool import KVPool
from kernels.linear import Linear, make_linear
from kernels.models.rope import inverse_frequencies
from kernels.ops.paged_attention.portable import paged_attention
from kernels.ops.rotary.reference import rotary_reference
from kernels.ops.store_kv.reference import store_kv_reference

_Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin [num_tokens, head_dim / 2]"""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    attended_norm: torch.Tensor
    feed_forward_norm: torch.Tensor
    fed_norm: torch.Tensor
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


class Gemma3Decoder:
    """See DecoderModel, whose two methods it implements.

    Unlike a Llama it scales its embeddings, norms what each half of a layer gives before adding it, and in most
    layers looks back only over a window, with a rotation of their own. Norm weights are the factors 1 + w in float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        shape: Gemma3Shape,
        weights: Mapping[str, torch.Tensor],
        kv_pool: KVPool,
        *,
        dtype: torch.dtype,
        quantized: bool,
    ) -> None:
        self._config = config
        self._shape = shape
        self._kv_pool = kv_pool
        self._device = kv_pool.keys.device
        self._dtype = dtype
        self._quantized = quantized
        self._embedding = self._matrix(weights, "model.embed_tokens.weight")
        # Rounded to the model's type as in training: 640 ** 0.5 is 25.25 in bfloat16.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device=self._device)
        self._final_norm = self._norm(weights, "model.norm.weight")
        head = self._embedding if config.tie_word_embeddings else self._matrix(weights, "lm_head.weight")
        self._head = make_linear(head, quantized=quantized)
        self._layers = [self._load_layer(weights, f"model.layers.{idx}.") for idx in range(config.num_layers)]
        self._global_frequencies = inverse_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling
        )
        self._local_frequencies = inverse_frequencies(config.head_dim, shape.local_rope_theta, None)

    def _matrix(self, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        return weights[name].to(self._device, self._dtype)

    def _norm(self, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        return weights[name].to(self._device, torch.float32)

    def _load_layer(self, weights: Mapping[str, torch.Tensor], prefix: str) -> _Layer:
        def joined(*names: str) -> Linear:
            parts = [self._matrix(weights, f"{prefix}{name}.weight") for name in names]
            return make_linear(torch.cat(parts), quantized=self._quantized)

        return _Layer(
            input_norm=self._norm(weights, prefix + "input_layernorm.weight"),
            query_norm=self._norm(weights, prefix + "self_attn.q_norm.weight"),
            key_norm=self._norm(weights, prefix + "self_attn.k_norm.weight"),
            attended_norm=self._norm(weights, prefix + "post_attention_layernorm.weight"),
            feed_forward_norm=self._norm(weights, prefix + "pre_feedforward_layernorm.weight"),
            fed_norm=self._norm(weights, prefix + "post_feedforward_layernorm.weight"),
            qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out=joined("self_attn.o_proj"),
            gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
            down=joined("mlp.down_proj"),
        )

    def warmup(self) -> None:
        """Nothing here is compiled."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = self._embedding[batch.token_ids] * self._embedding_scale
        everywhere = _rotation(batch.positions, self._global_frequencies)
        nearby = _rotation(batch.positions, self._local_frequencies)
        for idx, layer in enumerate(self._layers):
            rotation = everywhere if self._shape.layer_windows[idx] is None else nearby
            attended = layer.out(self._attend(idx, layer, self._normed(x, layer.input_norm), rotation, batch))
            x = x + self._normed(attended, layer.attended_norm)
            gate, up = layer.gate_up(self._normed(x, layer.feed_forward_norm)).chunk(2, dim=-1)
            fed = layer.down(F.gelu(gate, approximate="tanh") * up)
            x = x + self._normed(fed, layer.fed_norm)
        return self._head(self._normed(x[batch.sample_indices], self._final_norm)).float()

    def _attend(
        self, idx: int, layer: _Layer, x: torch.Tensor, rotation: _Rotation, batch: ForwardBatch
    ) -> torch.Tensor:
        """Attention output [num_tokens, num_heads * head_dim] of layer `idx`; its K/V goes into the pool."""
        config = self._config
        heads = layer.qkv(x).view(x.shape[0], -1, config.head_dim)
        query, key, value = torch.split(
            heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        query = rotary_reference(self._normed(query, layer.query_norm), *rotation)
        key = rotary_reference(self._normed(key, layer.key_norm), *rotation)
        keys, values = self._kv_pool.keys[idx], self._kv_pool.values[idx]
        store_kv_reference(key, value, keys, values, batch.slot_mapping)
        window = self._shape.layer_windows[idx]
        return paged_attention(query, keys, values, batch, self._shape.attention_scale, window).flatten(1)

    def _normed(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension; rounded to x's type only after the factor."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return (wide * scale * factor).to(x.dtype)


def _rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> _Rotation:
    angles = torch.outer(positions.float(), frequencies.to(positions.device))
    return angles.cos(), angles.sin()
