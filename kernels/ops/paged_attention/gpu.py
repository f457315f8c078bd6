"""Paged attention of a mixed batch on the GPU: decoding rows by split-KV, the others by tiles."""

import math

import torch

from kernels.batch import ForwardBatch
from kernels.ops.gpu.tuning import launch_config, next_power_of_two
from kernels.ops.paged_attention.gpu_decode import paged_decode
from kernels.ops.paged_attention.gpu_prefill import paged_prefill
from kernels.ops.store_kv.gpu import KVBlocks

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Compiled ahead and checked; other even sizes up to 256 work, padded to the next power of two."""


def paged_attention(
    query: torch.Tensor, kv: KVBlocks, batch: ForwardBatch, *, scale: float, window: int | None = None
) -> torch.Tensor:
    """Compute causal attention of query [num_tokens, num_heads, head_dim] over each row's blocks.

    The result has the shape and float type of `query`. With `window` a token sees itself and the window - 1 tokens
    before it. No value of `batch` is read on the host.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, _, kv_head_dim = kv.key.shape
    assert num_heads % num_kv_heads == 0
    assert head_dim == kv_head_dim
    assert head_dim <= 256
    assert query.is_contiguous()
    assert kv.key.is_contiguous()
    assert kv.value.is_contiguous()
    assert batch.block_tables.stride(1) == 1
    assert batch.block_tables.dtype == torch.int32
    num_rows, num_decode = batch.context_lens.shape[0], batch.num_decode_rows
    out = torch.empty_like(query)
    bucket = f"d{max(next_power_of_two(head_dim), 64)}"
    # Scores are in powers of two, because the hardware has exp2; the factor includes the scale of K.
    scale_log2 = scale * kv.key_scale * math.log2(math.e)
    if num_decode:
        paged_decode(
            query[:num_decode],
            kv.key,
            kv.value,
            batch.block_tables[:num_decode],
            batch.context_lens[:num_decode],
            scale_log2=scale_log2,
            value_scale=kv.value_scale,
            window=window or 0,
            out=out[:num_decode],
            config=launch_config("paged_decode", bucket, query.device),
        )
    if num_rows > num_decode:
        paged_prefill(
            query,
            kv.key,
            kv.value,
            batch.block_tables[num_decode:],
            batch.query_start[num_decode:],
            batch.context_lens[num_decode:],
            num_tokens=num_tokens - num_decode,
            scale_log2=scale_log2,
            value_scale=kv.value_scale,
            window=window or 0,
            out=out,
            config=launch_config("paged_prefill", bucket, query.device),
        )
    return out
