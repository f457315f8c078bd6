"""A causal language model of transformers, with its attention replaced by ours over paged keys and values."""

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface, PreTrainedModel

from kernels.batch import ForwardBatch
from kernels.model_config import ModelConfig
from kernels.ops.paged_attention.portable import Scores, paged_attention
from kernels.ops.store_kv.reference import store_kv_reference
from kernels.runtime.kv_pool import KVPool

ATTENTION_NAME = "tailrace_paged"
"""The name under which our attention is registered with transformers."""


@dataclass(frozen=True, slots=True)
class Span:
    """Which keys a layer's tokens see: a window or a chunk as in Scores, else the whole context."""

    window: int | None = None
    chunk: int | None = None


class Attention(Protocol):
    """Called once per layer, in order."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attend from query [num_tokens, num_heads, head_dim]; return [num_tokens, num_heads, value size] in its dtype.

        `options` holds the model's other arguments, such as `scaling` and `softcap`.
        """
        ...


class _PagedAttention:
    """Writes each layer's K/V where the batch says, then attends over the blocks of each row.

    The pool is sized for the layer with the most and the widest heads; other layers leave a part unused.
    """

    def __init__(self, kv_pool: KVPool, head_dim: int, spans: Sequence[Span], batch: ForwardBatch) -> None:
        self._kv_pool = kv_pool
        self._head_dim = head_dim
        self._spans = spans
        self._batch = batch
        self._layer = 0

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        num_heads, span = key.shape[1], self._spans[self._layer]
        keys = self._kv_pool.keys[self._layer][:, :num_heads]
        values = self._kv_pool.values[self._layer][:, :num_heads]
        self._layer += 1
        scale = options.get("scaling")
        scores = Scores(
            query.shape[2] ** -0.5 if scale is None else scale,
            window=span.window,
            chunk=span.chunk,
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )
        store_kv_reference(self._wide(key), self._wide(value), keys, values, self._batch.slot_mapping)
        attended = paged_attention(self._wide(query), keys, values, self._batch, scores)
        return attended[..., : value.shape[2]]

    def _wide(self, heads: torch.Tensor) -> torch.Tensor:
        """Pad with zeros to the pool's head size; the zeros add nothing to a score."""
        missing = self._head_dim - heads.shape[2]
        return F.pad(heads, (0, missing)) if missing else heads


class AdapterModel:
    """A model of transformers bound to one KV pool.

    The whole batch runs as one sequence, so only attention may treat rows differently; loading has checked that.
    `spans` has one entry per call of attention in a forward pass.
    """

    def __init__(
        self, config: ModelConfig, model: PreTrainedModel, spans: Sequence[Span], kv_pool: KVPool
    ) -> None:
        self.config = config
        self.kv_pool = kv_pool
        self._model = model
        self._spans = spans

    def warmup(self) -> None:
        """Do nothing: no part of this model is compiled."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's K/V into the pool and return the logits [num_sampled, vocab_size] in float32."""
        attention = _PagedAttention(self.kv_pool, self.config.head_dim, self._spans, batch)
        return run(self._model, attention, batch.token_ids, batch.positions, batch.sample_indices)


@torch.inference_mode()
def run(
    model: PreTrainedModel,
    attention: Attention,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    sample_indices: torch.Tensor,
) -> torch.Tensor:
    """Run a model whose attention is ours; return the logits [num_sampled, vocab_size] in float32.

    token_ids and positions are [num_tokens] int64, sample_indices [num_sampled] int64.
    """
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


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks: [1, heads, num_tokens, head_dim] in, [1, num_tokens, heads, head_dim] out.

    Any float type; the output has the query's.
    """
    options |= {"module": module, "attention_mask": attention_mask}
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return _current.get().attend(query, key, value, options).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, attention_forward)
