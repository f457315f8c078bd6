"""A causal language model of transformers, with its attention replaced by ours over paged keys and values."""

import inspect
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.kv_pool import KVPool
from kernels.ops.paged_attention.portable import paged_attention
from kernels.ops.store_kv.reference import store_kv_reference

ATTENTION_NAME = "tailrace_paged"
"""Under which transformers finds our attention."""


class Attention(Protocol):
    """Called once per layer, in order."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim] like query; key and value have num_kv_heads.

        `options` is whatever the model passes besides: `scaling`, `sliding_window` and the like.
        """
        ...


class _PagedAttention:
    """Writes each layer's K/V where the batch says, then attends over the blocks of each row."""

    def __init__(self, kv_pool: KVPool, batch: ForwardBatch) -> None:
        self._kv_pool = kv_pool
        self._batch = batch
        self._layer = 0

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        keys, values = self._kv_pool.keys[self._layer], self._kv_pool.values[self._layer]
        self._layer += 1
        store_kv_reference(key, value, keys, values, self._batch.slot_mapping)
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return paged_attention(query, keys, values, self._batch, scale, options.get("sliding_window"))


class AdapterModel:
    """Bound to one KV pool; see DecoderModel for its two methods.

    The whole batch runs as one sequence, in which nothing but attention may tell one row from another; loading
    has made sure of that.
    """

    def __init__(self, config: ModelConfig, model: PreTrainedModel, kv_pool: KVPool) -> None:
        self.config = config
        self.kv_pool = kv_pool
        self._model = model

    def warmup(self) -> None:
        """Nothing here is compiled."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        attention = _PagedAttention(self.kv_pool, batch)
        return run(self._model, attention, batch.token_ids, batch.positions, batch.sample_indices)


@torch.inference_mode()
def run(
    model: PreTrainedModel,
    attention: Attention,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    sample_indices: torch.Tensor,
) -> torch.Tensor:
    """Logits [num_sampled, vocab_size] in float32 of a model whose attention is ATTENTION_NAME."""
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": sample_indices} if keeps else {}
    token = _current.set(attention)
    try:
        output = model(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **options
        )
    finally:
        _current.reset(token)
    logits: torch.Tensor = output.logits[0]
    return (logits if keeps else logits[sample_indices]).float()


_current: ContextVar[Attention] = ContextVar("attention of the forward pass that this thread runs")


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: [1, heads, num_tokens, head_dim] in, [1, num_tokens, heads, head_dim] out."""
    options |= {"module": module, "attention_mask": attention_mask}
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return _current.get().attend(query, key, value, options).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)
