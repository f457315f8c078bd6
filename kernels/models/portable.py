"""The decoder in plain torch operations: any device, any floating-point type. The one the others are held against."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.models.decoder_tensors import DecoderTensors
from kernels.models.rope import rotary_tables
from kernels.ops.linear.portable import Linear
from kernels.ops.paged_attention.portable import Scores, paged_attention
from kernels.ops.rms_norm.reference import rms_norm_reference
from kernels.ops.rotary.reference import rotary_reference
from kernels.ops.silu_mul.reference import silu_mul_reference
from kernels.ops.store_kv.reference import store_kv_reference
from kernels.runtime.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


class PortableDecoder:
    """See DecoderModel, whose two methods it implements."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        kv_pool: KVPool,
        *,
        dtype: torch.dtype,
        quantized: bool,
    ) -> None:
        self._config = config
        self._kv_pool = kv_pool
        self._device = kv_pool.keys.device
        self._scores = Scores(config.head_dim**-0.5, config.sliding_window)
        tensors = DecoderTensors(weights, self._device, dtype, quantized=quantized)
        self._embedding = tensors["model.embed_tokens.weight"]
        self._final_norm = tensors["model.norm.weight"]
        self._head = tensors.head(self._embedding, tied=config.tie_word_embeddings)
        self._layers = [self._load_layer(tensors, f"model.layers.{idx}.") for idx in range(config.num_layers)]
        cos, sin = rotary_tables(config, config.max_position_embeddings)
        self._cos, self._sin = cos.to(self._device), sin.to(self._device)

    def _load_layer(self, tensors: DecoderTensors, prefix: str) -> _Layer:
        attention = prefix + "self_attn."
        has_norms = self._config.qk_norm
        return _Layer(
            input_norm=tensors[prefix + "input_layernorm.weight"],
            post_norm=tensors[prefix + "post_attention_layernorm.weight"],
            query_norm=tensors[attention + "q_norm.weight"] if has_norms else None,
            key_norm=tensors[attention + "k_norm.weight"] if has_norms else None,
            qkv=tensors.linear(attention, "q_proj", "k_proj", "v_proj", bias=self._config.qkv_bias),
            out=tensors.linear(attention, "o_proj"),
            gate_up=tensors.linear(prefix, "mlp.gate_proj", "mlp.up_proj"),
            down=tensors.linear(prefix, "mlp.down_proj"),
        )

    def warmup(self) -> None:
        """Nothing here is compiled."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        eps = self._config.rms_norm_eps
        x = self._embedding[batch.token_ids]
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        for index, layer in enumerate(self._layers):
            normed = rms_norm_reference(x, layer.input_norm, eps)
            x = x + layer.out(self._attend(index, layer, normed, cos, sin, batch))
            normed = rms_norm_reference(x, layer.post_norm, eps)
            x = x + layer.down(silu_mul_reference(layer.gate_up(normed)))
        return self._head(rms_norm_reference(x[batch.sample_indices], self._final_norm, eps)).float()

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Attention output [num_tokens, num_heads * head_dim] of layer `index`; its K/V goes into the pool."""
        config = self._config
        heads = layer.qkv(x).view(x.shape[0], -1, config.head_dim)
        query, key, value = heads.tensor_split(
            (config.num_heads, config.num_heads + config.num_kv_heads), dim=1
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm_reference(query, layer.query_norm, config.rms_norm_eps)
            key = rms_norm_reference(key, layer.key_norm, config.rms_norm_eps)
        keys, values = self._kv_pool.keys[index], self._kv_pool.values[index]
        store_kv_reference(rotary_reference(key, cos, sin), value, keys, values, batch.slot_mapping)
        query = rotary_reference(query, cos, sin)
        return paged_attention(query, keys, values, batch, self._scores).flatten(1)
