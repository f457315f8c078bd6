"""Paged attention in torch operations: decoding rows together, prefill chunks row by row, K/V gathered for each."""

import torch
import torch.nn.functional as F  # noqa: N812

from kernels.batch import ForwardBatch
from kernels.ops.paged_attention.reference import gather_kv, visible

_MAX_ROWS_TOGETHER = 16
"""Bounds the gathered copy, and the padding that a row pays for its longest neighbour."""


def paged_attention(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of query [num_tokens, num_heads, head_dim] over one layer's blocks."""
    output = torch.empty_like(query)
    lens, bounds = batch.context_lens.tolist(), batch.query_start.tolist()
    longest_first = sorted(range(batch.num_decode_rows), key=lambda row: -lens[row])
    for first in range(0, len(longest_first), _MAX_ROWS_TOGETHER):
        rows = torch.tensor(longest_first[first : first + _MAX_ROWS_TOGETHER], device=query.device)
        tables, num_visible = batch.block_tables[rows], batch.context_lens[rows]
        longest = lens[longest_first[first]]
        output[rows] = _decode(
            query[rows], key_blocks, value_blocks, tables, num_visible, longest, scale, window
        )
    for row in range(batch.num_decode_rows, len(lens)):
        own = slice(bounds[row], bounds[row + 1])
        key, value = gather_kv(key_blocks, value_blocks, batch.block_tables[row], lens[row])
        mask = visible(bounds[row + 1] - bounds[row], lens[row], window, query.device)
        q = query[own].transpose(0, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(
            q, key.unsqueeze(0), value.unsqueeze(0), attn_mask=mask, scale=scale, enable_gqa=True
        )
        output[own] = attended[0].transpose(0, 1)
    return output


def _decode(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    tables: torch.Tensor,
    num_visible: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """One token per row: query [num_rows, num_heads, head_dim], rows padded to `longest` keys."""
    num_kv_heads, block_size = key_blocks.shape[1], key_blocks.shape[3]
    table = tables[:, : -(-longest // block_size)].long()
    key = key_blocks[table].permute(0, 2, 1, 4, 3, 5).flatten(4).flatten(2, 3)
    value = value_blocks[table].permute(0, 2, 1, 3, 5, 4).flatten(2, 4)
    at = torch.arange(key.shape[2], device=query.device)
    mask = at < num_visible.unsqueeze(1)
    if window is not None:
        mask &= at >= (num_visible - window).unsqueeze(1)
    # Padding may point at blocks of other requests: 0 · NaN would carry their failure into this row.
    absent = ~mask[:, None, :, None]
    grouped = query.reshape(query.shape[0], num_kv_heads, -1, query.shape[2])
    attended = F.scaled_dot_product_attention(
        grouped,
        key.masked_fill(absent, 0),
        value.masked_fill(absent, 0),
        attn_mask=mask[:, None, None],
        scale=scale,
    )
    return attended.flatten(1, 2)
