"""Gemma 3 (text) in plain torch operations: any device, any floating-point type."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from kernels.batch import ForwardBatch
from kernels.config import Gemma3Shape, ModelConfig
from kernels.models.decoder_tensors import DecoderTensors
from kernels.models.rope import inverse_frequencies
from kernels.ops.linear.portable import Linear
from kernels.ops.paged_attention.portable import Scores, paged_attention
from kernels.ops.rotary.reference import rotary_reference
from kernels.ops.store_kv.reference import store_kv_reference
from kernels.runtime.kv_pool import KVPool

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
        self._scores = [Scores(shape.attention_scale, window) for window in shape.layer_windows]
        tensors = DecoderTensors(weights, kv_pool.keys.device, dtype, quantized=quantized)
        self._embedding = tensors["model.embed_tokens.weight"]
        # Rounded to the model's type as in training: 640 ** 0.5 is 25.25 in bfloat16.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device=kv_pool.keys.device)
        self._final_norm = tensors.wide("model.norm.weight")
        self._head = tensors.head(self._embedding, tied=config.tie_word_embeddings)
        self._layers = [_load_layer(tensors, f"model.layers.{idx}.") for idx in range(config.num_layers)]
        self._global_frequencies = inverse_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling
        )
        self._local_frequencies = inverse_frequencies(config.head_dim, shape.local_rope_theta, None)

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
        return paged_attention(query, keys, values, batch, self._scores[idx]).flatten(1)

    def _normed(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension; rounded to x's type only after the factor."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return (wide * scale * factor).to(x.dtype)


def _load_layer(tensors: DecoderTensors, prefix: str) -> _Layer:
    return _Layer(
        input_norm=tensors.wide(prefix + "input_layernorm.weight"),
        query_norm=tensors.wide(prefix + "self_attn.q_norm.weight"),
        key_norm=tensors.wide(prefix + "self_attn.k_norm.weight"),
        attended_norm=tensors.wide(prefix + "post_attention_layernorm.weight"),
        feed_forward_norm=tensors.wide(prefix + "pre_feedforward_layernorm.weight"),
        fed_norm=tensors.wide(prefix + "post_feedforward_layernorm.weight"),
        qkv=tensors.linear(prefix + "self_attn.", "q_proj", "k_proj", "v_proj"),
        out=tensors.linear(prefix, "self_attn.o_proj"),
        gate_up=tensors.linear(prefix, "mlp.gate_proj", "mlp.up_proj"),
        down=tensors.linear(prefix, "mlp.down_proj"),
    )


def _rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> _Rotation:
    angles = torch.outer(positions.float(), frequencies.to(positions.device))
    return angles.cos(), angles.sin()
