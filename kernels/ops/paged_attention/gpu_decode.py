"""Attention of one new token per row over its blocks: split along the context, then reduced.

A split covers a fixed number of tokens whatever else is in the batch, so that a row's sums are taken in the same order
alone and in any batch. The grid depends on shapes only and is bounded. Its programs share the splits that the rows
really have, so that one long row among short ones, or a wide bucket of a CUDA graph, costs nothing.
"""

# ruff: noqa: N803  compile-time parameters are upper case, as everywhere in Triton

import torch
import triton.language as tl

from kernels.ops.gpu.jit import device_function, kernel
from kernels.ops.gpu.tuning import LaunchConfig, next_power_of_two


@device_function
def _first_split(context_len: tl.tensor, SPLIT_TOKENS: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Return the first of a row's splits with a token in the window."""
    return tl.maximum(context_len - WINDOW, 0) // SPLIT_TOKENS if WINDOW > 0 else context_len * 0


@device_function
def _split_ends(
    context_lens: tl.tensor,
    num_rows: tl.tensor,
    ROWS_BLOCK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """[ROWS_BLOCK]: the number of splits of each row and all rows before it."""
    rows = tl.arange(0, ROWS_BLOCK)
    lens = tl.load(context_lens + rows, mask=rows < num_rows, other=0)
    live = (lens + SPLIT_TOKENS - 1) // SPLIT_TOKENS - _first_split(lens, SPLIT_TOKENS, WINDOW)
    return tl.cumsum(live, axis=0)


@device_function
def _find_split(ends: tl.tensor, nth: tl.tensor) -> tl.tensor:
    """The row that has the nth split of all, and the split's number among the row's own."""
    is_before = ends <= nth
    row = tl.sum(is_before.to(tl.int32), axis=0).to(tl.int64)
    return row, nth - tl.max(tl.where(is_before, ends, 0), axis=0)


@kernel("block_tables", "context_lens", "table_stride", "num_rows", "num_splits")
def _decode_kernel(
    query: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    scale_log2: tl.tensor,
    value_scale: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    group = tl.arange(0, GROUP_BLOCK)
    in_group = group < GROUP
    dims = tl.arange(0, DIM_BLOCK)
    in_dim = dims < HEAD_DIM
    ends = _split_ends(context_lens, num_rows, ROWS_BLOCK, SPLIT_TOKENS, WINDOW)
    # Heads of one split follow each other because their K and V are adjacent in memory.
    for item in range(tl.program_id(0), tl.max(ends, axis=0) * NUM_KV_HEADS, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        row, nth = _find_split(ends, item // NUM_KV_HEADS)
        context_len = tl.load(context_lens + row)
        split = _first_split(context_len, SPLIT_TOKENS, WINDOW) + nth
        begin = split * SPLIT_TOKENS
        if WINDOW > 0:
            begin = tl.maximum(begin, context_len - WINDOW)
        end = tl.minimum((split + 1) * SPLIT_TOKENS, context_len)

        heads = kv_head * GROUP + group
        query_at = query + (row * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(query_at, mask=in_group[:, None] & in_dim[None, :], other=0.0)
        highest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        # Partial sums stay per column and are reduced once after the loop: reducing in it would synchronize warps.
        totals = tl.zeros([GROUP_BLOCK, BLOCK_N], tl.float32)
        acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
        for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
            tokens = start + tl.arange(0, BLOCK_N)
            valid = (tokens >= begin) & (tokens < end)
            block = tl.load(block_tables + row * table_stride + tokens // BLOCK_SIZE, mask=valid, other=0)
            base = (block.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + tokens % BLOCK_SIZE
            at = base[:, None] * HEAD_DIM + dims[None, :]
            kv_mask = valid[:, None] & in_dim[None, :]
            k = tl.load(key_pool + at, mask=kv_mask, other=0.0).to(q.dtype)
            v = tl.load(value_pool + at, mask=kv_mask, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_highest[:, None])
            decay = tl.exp2(highest - new_highest)
            totals = totals * decay[:, None] + weights
            acc = acc * decay[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
            highest = new_highest
        total = tl.sum(totals, axis=1)
        # [num_rows, num_heads, num_splits]
        part = (row * NUM_HEADS + heads) * num_splits + split
        tl.store(log_sums + part, highest + tl.log2(total), mask=in_group)
        result = acc / total[:, None] * value_scale
        out_mask = in_group[:, None] & in_dim[None, :]
        tl.store(
            out + part[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=out_mask
        )


@kernel("context_lens", "num_splits")
def _reduce_kernel(
    parts: tl.tensor,
    log_sums: tl.tensor,
    out: tl.tensor,
    context_lens: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context_len = tl.load(context_lens + row)
    used = (context_len + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    base = (row * NUM_HEADS + head) * num_splits
    dims = tl.arange(0, DIM_BLOCK)
    in_dim = dims < HEAD_DIM
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([DIM_BLOCK], tl.float32)
    # Splits before the window were not written.
    for start in range(_first_split(context_len, SPLIT_TOKENS, WINDOW), used, SPLITS_BLOCK):
        splits = start + tl.arange(0, SPLITS_BLOCK)
        is_used = splits < used
        log_sum = tl.load(log_sums + base + splits, mask=is_used, other=float("-inf"))
        values = tl.load(
            parts + (base + splits)[:, None] * HEAD_DIM + dims[None, :],
            mask=is_used[:, None] & in_dim[None, :],
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(log_sum, axis=0))
        weights = tl.exp2(log_sum - new_highest)
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay + tl.sum(weights[:, None] * values, axis=0)
        highest = new_highest
    # A row without context only pads a CUDA graph: zero, not 0 / 0.
    result = tl.where(used > 0, acc / total, 0.0)
    at = (row * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(out + at, result.to(out.dtype.element_ty), mask=in_dim)


SPLIT_TOKENS = 256
"""Part of the numerics, hence not in the tuning table: large enough that the partial results are 3 % of the
traffic at four heads per group, small enough that 8 K of context fill a large device at batch 1."""

SPLITS_BLOCK = 32
"""Splits that one round of the reduction reads, for heads of 128: 8 K of context fit one round."""
MAX_PROGRAMS = 4096
"""About ten per multiprocessor slot of a large device: they end evenly, and idle ones are few."""
ROWS_BLOCKS = (32, 256)
"""Rows that a program searches: two compiled variants for all usual batches, the first within a warp."""


def paged_decode(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale_log2: float,
    value_scale: float,
    window: int,
    out: torch.Tensor,
    config: LaunchConfig,
) -> None:
    """Attend from one token per row: query and out [num_rows, num_heads, head_dim] of one float type.

    The caller has checked all arguments.
    """
    num_rows, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_pool.shape
    group = num_heads // num_kv_heads
    num_splits = max(1, -(-block_tables.shape[1] * block_size // SPLIT_TOKENS))
    parts = torch.empty((num_rows, num_heads, num_splits, head_dim), dtype=torch.float32, device=query.device)
    log_sums = parts.new_empty((num_rows, num_heads, num_splits))
    dim_block = max(next_power_of_two(head_dim), 16)
    shapes = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": dim_block,
        "SPLIT_TOKENS": SPLIT_TOKENS,
        "WINDOW": window,
    }
    arguments = shapes | {
        "query": query,
        "key_pool": key_pool,
        "value_pool": value_pool,
        "out": parts,
        "log_sums": log_sums,
        "block_tables": block_tables,
        "context_lens": context_lens,
        "scale_log2": scale_log2,
        "value_scale": value_scale,
        "table_stride": block_tables.stride(0),
        "num_rows": num_rows,
        "num_splits": num_splits,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        # 16 rows are the least that tensor cores multiply.
        "GROUP_BLOCK": max(next_power_of_two(group), 16),
        "BLOCK_SIZE": block_size,
        "BLOCK_N": config.block_n,
        "ROWS_BLOCK": next((size for size in ROWS_BLOCKS if size >= num_rows), next_power_of_two(num_rows)),
    }
    _decode_kernel.launch(
        (min(num_rows * num_kv_heads * num_splits, MAX_PROGRAMS),),
        arguments,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    reduction = shapes | {
        "parts": parts,
        "log_sums": log_sums,
        "out": out,
        "context_lens": context_lens,
        "num_splits": num_splits,
        "SPLITS_BLOCK": max(SPLITS_BLOCK * 128 // max(dim_block, 128), 1),
    }
    _reduce_kernel.launch((num_rows, num_heads), reduction, num_warps=4, num_stages=1)
