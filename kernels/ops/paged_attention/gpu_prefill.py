"""Attention of many new tokens per row, causal over the row's prefix and its own chunk.

A tile holds the tokens of one row times the query heads of one KV head, so that K and V are loaded once per group.
The grid is an upper bound taken from shapes; each program finds its row by bisection over `query_start`.
"""

# ruff: noqa: N803, N806  compile-time parameters are upper case, as everywhere in Triton

import torch
import triton.language as tl

from kernels.ops.gpu.jit import device_function, kernel
from kernels.ops.gpu.tuning import LaunchConfig, next_power_of_two


@device_function
def _find_row(
    query_start: tl.tensor,
    tile: tl.tensor,
    num_rows: tl.tensor,
    first_token: tl.tensor,
    TILE_TOKENS: tl.constexpr,
) -> tl.tensor:
    """The last row whose first tile is not after `tile`, when row i's tiles start at (tokens before it) // n + i."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        start = (tl.load(query_start + middle) - first_token) // TILE_TOKENS + middle
        if start <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@kernel("block_tables", "query_start", "context_lens", "table_stride", "num_rows")
def _prefill_kernel(
    query: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    out: tl.tensor,
    block_tables: tl.tensor,
    query_start: tl.tensor,
    context_lens: tl.tensor,
    scale_log2: tl.tensor,
    value_scale: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    first_token = tl.load(query_start)
    # The last tile of a chunk reads most, so it starts first: programs then end at about the same time.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = _find_row(query_start, tile, num_rows, first_token, TILE_TOKENS)
    row_start = tl.load(query_start + row)
    row_len = tl.load(query_start + row + 1) - row_start
    tile_in_row = tile - ((row_start - first_token) // TILE_TOKENS + row)
    tile_start = tile_in_row * TILE_TOKENS
    if tile_start >= row_len:
        return

    context_len = tl.load(context_lens + row)
    lanes = tl.arange(0, BLOCK_M)
    local = tile_start + lanes // GROUP
    active = (lanes < TILE_TOKENS * GROUP) & (local < row_len)
    position = context_len - row_len + local
    heads = kv_head * GROUP + lanes % GROUP
    dims = tl.arange(0, DIM_BLOCK)
    in_dim = dims < HEAD_DIM
    at = ((row_start + local).to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    mask = active[:, None] & in_dim[None, :]
    q = tl.load(query + at, mask=mask, other=0.0)

    first_position = context_len - row_len + tile_start
    end = tl.minimum(first_position + TILE_TOKENS, context_len)
    begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N if WINDOW > 0 else 0
    table = block_tables + row.to(tl.int64) * table_stride
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        in_context = tokens < end
        block = tl.load(table + tokens // BLOCK_SIZE, mask=in_context, other=0)
        base = (block.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + tokens % BLOCK_SIZE
        kv_at = base[:, None] * HEAD_DIM + dims[None, :]
        kv_mask = in_context[:, None] & in_dim[None, :]
        k = tl.load(key_pool + kv_at, mask=kv_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = tokens[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (tokens[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # With a window the first tiles may hold nothing for a late token: a finite pivot avoids inf - inf.
        pivot = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(highest - pivot)
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(value_pool + kv_at, mask=kv_mask, other=0.0).to(q.dtype)
        acc = acc * decay[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        highest = new_highest
    result = acc / total[:, None] * value_scale
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


def paged_prefill(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_tokens: int,
    scale_log2: float,
    value_scale: float,
    window: int,
    out: torch.Tensor,
    config: LaunchConfig,
) -> None:
    """Attend from rows of any length, which have `num_tokens` tokens in all.

    query and out are [all tokens of the batch, num_heads, head_dim] of one float type.
    """
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_pool.shape
    num_rows = context_lens.shape[0]
    group = num_heads // num_kv_heads
    block_m = max(config.block_m, next_power_of_two(group))
    arguments = {
        "query": query,
        "key_pool": key_pool,
        "value_pool": value_pool,
        "out": out,
        "block_tables": block_tables,
        "query_start": query_start,
        "context_lens": context_lens,
        "scale_log2": scale_log2,
        "value_scale": value_scale,
        "table_stride": block_tables.stride(0),
        "num_rows": num_rows,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": max(next_power_of_two(head_dim), 16),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": block_m,
        "BLOCK_N": config.block_n,
        "WINDOW": window,
    }
    # Each row may end in one tile that is not full.
    grid = (num_tokens // (block_m // group) + num_rows, num_kv_heads)
    _prefill_kernel.launch(grid, arguments, num_warps=config.num_warps, num_stages=config.num_stages)
