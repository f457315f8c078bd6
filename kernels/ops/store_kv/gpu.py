"""Rotary embedding and the KV write on the GPU, in one pass over the fused projection's output.

Optionally the norm over each head of q and k (Qwen3, Gemma 3) comes first, and K/V are stored as fp8.
"""

# ruff: noqa: N803, N806  compile-time parameters are upper case, as everywhere in Triton

from dataclasses import dataclass

import torch
import triton.language as tl

from kernels.ops.gpu.jit import kernel
from kernels.ops.gpu.tuning import launch_config, next_power_of_two


@kernel()
def _store_kv_kernel(
    qkv: tl.tensor,
    query: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    eps: tl.tensor,
    key_inverse_scale: tl.tensor,
    value_inverse_scale: tl.tensor,
    qkv_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    lanes = tl.arange(0, HALF_BLOCK)
    is_query = heads < NUM_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    in_lane = lanes < HALF
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_lane[None, :]

    source = qkv + token * qkv_stride + heads[:, None] * HEAD_DIM + lanes[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = tl.sum(low * low + high * high, axis=1) / HEAD_DIM
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        q_low = tl.load(query_norm + lanes, mask=in_lane, other=0.0).to(tl.float32)
        q_high = tl.load(query_norm + HALF + lanes, mask=in_lane, other=0.0).to(tl.float32)
        k_low = tl.load(key_norm + lanes, mask=in_lane, other=0.0).to(tl.float32)
        k_high = tl.load(key_norm + HALF + lanes, mask=in_lane, other=0.0).to(tl.float32)
        normed_low = low * scale * tl.where(is_query[:, None], q_low[None, :], k_low[None, :])
        normed_high = high * scale * tl.where(is_query[:, None], q_high[None, :], k_high[None, :])
        low = tl.where(is_value[:, None], low, normed_low)
        high = tl.where(is_value[:, None], high, normed_high)

    position = tl.load(positions + token).to(tl.int64)
    cosine = tl.load(cos + position * HALF + lanes, mask=in_lane, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + position * HALF + lanes, mask=in_lane, other=0.0).to(tl.float32)[None, :]
    turned_low = tl.where(is_value[:, None], low, low * cosine - high * sine)
    turned_high = tl.where(is_value[:, None], high, high * cosine + low * sine)

    to_query = query + (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + lanes[None, :]
    query_mask = is_query[:, None] & in_lane[None, :]
    tl.store(to_query, turned_low.to(query.dtype.element_ty), mask=query_mask)
    tl.store(to_query + HALF, turned_high.to(query.dtype.element_ty), mask=query_mask)

    slot = tl.load(slot_mapping + token).to(tl.int64)
    # A row that only pads a CUDA graph has slot -1: its K/V goes nowhere.
    keep = slot >= 0
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    key_head = heads[:, None] - NUM_HEADS
    key_at = ((block * NUM_KV_HEADS + key_head) * BLOCK_SIZE + offset) * HEAD_DIM + lanes[None, :]
    key_mask = is_key[:, None] & in_lane[None, :] & keep
    element: tl.constexpr = key_pool.dtype.element_ty
    tl.store(key_pool + key_at, (turned_low * key_inverse_scale).to(element), mask=key_mask)
    tl.store(key_pool + key_at + HALF, (turned_high * key_inverse_scale).to(element), mask=key_mask)
    value_at = key_at - NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    value_mask = is_value[:, None] & in_lane[None, :] & keep
    tl.store(value_pool + value_at, (turned_low * value_inverse_scale).to(element), mask=value_mask)
    tl.store(value_pool + value_at + HALF, (turned_high * value_inverse_scale).to(element), mask=value_mask)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm over each head of q and k before the rotary embedding. Weights [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rotary:
    """Tables [max positions, head_dim / 2] in float32."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """One layer's pools, [num_blocks, num_kv_heads, block_size, head_dim] each, contiguous.

    The scales turn stored numbers into real ones: K = stored * key_scale. 1 unless stored as fp8.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


def store_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotary: Rotary,
    kv: KVBlocks,
    *,
    norm: HeadNorm | None = None,
) -> torch.Tensor:
    """Rotate q and k, write k and v at `slot_mapping`, return q as [num_tokens, num_heads, head_dim].

    `qkv` is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] of any float type, which q keeps. positions and
    slot_mapping are [num_tokens] int64; a negative slot writes nothing.
    """
    _, num_kv_heads, block_size, head_dim = kv.key.shape
    num_tokens, width = qkv.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    assert num_heads > 0
    assert width % head_dim == 0
    assert head_dim % 2 == 0
    assert qkv.stride(1) == 1
    assert kv.key.is_contiguous()
    assert kv.value.is_contiguous()
    assert kv.key.dtype == kv.value.dtype
    assert rotary.cos.shape[1] == head_dim // 2
    assert rotary.cos.is_contiguous()
    assert rotary.sin.is_contiguous()
    query = qkv.new_empty((num_tokens, num_heads, head_dim))
    half_block = next_power_of_two(head_dim // 2)
    config = launch_config("store_kv", f"d{max(2 * half_block, 64)}", qkv.device)
    arguments = {
        "qkv": qkv,
        "query": query,
        "key_pool": kv.key,
        "value_pool": kv.value,
        "cos": rotary.cos,
        "sin": rotary.sin,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "query_norm": norm.query if norm else qkv,
        "key_norm": norm.key if norm else qkv,
        "eps": norm.eps if norm else 0.0,
        "key_inverse_scale": 1.0 / kv.key_scale,
        "value_inverse_scale": 1.0 / kv.value_scale,
        "qkv_stride": qkv.stride(0),
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF_BLOCK": half_block,
        "HEADS_BLOCK": config.block_m,
        "BLOCK_SIZE": block_size,
        "HAS_NORM": norm is not None,
    }
    grid = (num_tokens, -(-(num_heads + 2 * num_kv_heads) // config.block_m))
    _store_kv_kernel.launch(grid, arguments, num_warps=config.num_warps)
    return query
