"""Paged attention in torch operations: decoding rows together, prefill chunks row by row, K/V gathered for each."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from kernels.batch import ForwardBatch
from kernels.ops.paged_attention.reference import gather_kv, visible

_MAX_ROWS_TOGETHER = 16
"""Bounds the gathered copy, and the padding of a row to the longest row beside it."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Which keys a token of one layer sees, and how it weighs them."""

    scale: float
    """Factor of q·kᵀ."""
    window: int | None = None
    """A token sees this many tokens, itself and those just before it."""
    chunk: int | None = None
    """The sequence is cut into pieces of this many tokens, and a token sees only its own piece."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap)."""
    sinks: torch.Tensor | None = None
    """[num_heads]: a further score in each head's softmax, for a key without a value."""

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def paged_attention(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    batch: ForwardBatch,
    scores: Scores,
) -> torch.Tensor:
    """Compute causal attention of query [num_tokens, num_heads, head_dim] over one layer's blocks.

    key_blocks and value_blocks are as in KVPool, without num_layers; all have one float type, which the result has too.
    """
    output = torch.empty_like(query)
    lens, bounds = batch.context_lens.tolist(), batch.query_start.tolist()
    longest_first = sorted(range(batch.num_decode_rows), key=lambda row: -lens[row])
    for first in range(0, len(longest_first), _MAX_ROWS_TOGETHER):
        rows = torch.tensor(longest_first[first : first + _MAX_ROWS_TOGETHER], device=query.device)
        tables, num_visible = batch.block_tables[rows], batch.context_lens[rows]
        key, value = _gather_rows(key_blocks, value_blocks, tables, lens[longest_first[first]])
        output[rows] = _decode(query[rows], key, value, num_visible, scores)
    for row in range(batch.num_decode_rows, len(lens)):
        own = slice(bounds[row], bounds[row + 1])
        key, value = gather_kv(key_blocks, value_blocks, batch.block_tables[row], lens[row])
        mask = visible(bounds[row + 1] - bounds[row], lens[row], scores.window, query.device)
        if scores.chunk is not None:
            mask &= _same_chunk(mask, scores.chunk)
        q = query[own].transpose(0, 1).unsqueeze(0)
        attended = _attend(q, key.unsqueeze(0), value.unsqueeze(0), mask, scores)
        output[own] = attended[0].transpose(0, 1)
    return output


def _same_chunk(mask: torch.Tensor, chunk: int) -> torch.Tensor:
    """[num_queries, context_len] like mask; the last query is at context_len - 1."""
    num_queries, context_len = mask.shape
    at = torch.arange(context_len, device=mask.device) // chunk
    return at[context_len - num_queries :, None] == at


def _gather_rows(
    key_blocks: torch.Tensor, value_blocks: torch.Tensor, tables: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [num_rows, num_kv_heads, whole blocks, head_dim] of rows of up to `longest` tokens."""
    table = tables[:, : -(-longest // key_blocks.shape[3])].long()
    key = key_blocks[table].permute(0, 2, 1, 4, 3, 5).flatten(4).flatten(2, 3)
    value = value_blocks[table].permute(0, 2, 1, 3, 5, 4).flatten(2, 4)
    return key, value


def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_visible: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """One token per row: query [num_rows, num_heads, head_dim]; row i may look at its first num_visible[i] keys."""
    at, end = torch.arange(key.shape[2], device=query.device), num_visible.unsqueeze(1)
    mask = at < end
    if scores.window is not None:
        mask &= at >= end - scores.window
    if scores.chunk is not None:
        mask &= at // scores.chunk == (end - 1) // scores.chunk
    # Padding may point at blocks of other requests: 0 · NaN would carry their failure into this row.
    absent = ~mask[:, None, :, None]
    attended = _attend(
        query.unsqueeze(2),
        key.masked_fill(absent, 0),
        value.masked_fill(absent, 0),
        mask[:, None, None],
        scores,
    )
    return attended.squeeze(2)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """[num_rows, num_heads, num_queries, head_dim] like query; mask broadcasts to its scores."""
    if scores.is_plain:
        if query.shape[2] == 1:  # the heads of a group become queries, which share one row of the mask
            grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
            attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scores.scale)
            return attended.reshape(query.shape)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scores.scale, enable_gqa=True
        )
    return _attend_with_scores(query, key, value, mask, scores)


def _attend_with_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attention with softcap or sinks, which torch's own lacks; one KV head at a time, to bound memory."""
    groups = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])
    output = torch.empty_like(groups)
    sinks = None if scores.sinks is None else scores.sinks.float().reshape(key.shape[1], -1, 1)
    for head in range(key.shape[1]):
        weighed = groups[:, head].float() @ key[:, head, None].float().transpose(2, 3) * scores.scale
        if scores.softcap is not None:
            weighed = (weighed / scores.softcap).tanh() * scores.softcap
        weighed = weighed.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            weighed = torch.cat((weighed, sinks[head].expand(*weighed.shape[:3]).unsqueeze(3)), dim=3)
        weights = weighed.softmax(3)[..., : key.shape[2]].to(value.dtype)
        output[:, head] = weights @ value[:, head, None]
    return output.flatten(1, 2)
