"""Paged attention, decoding rows and others in one batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch

from kernels.batch import ForwardBatch
from kernels.ops.paged_attention.gpu import paged_attention
from kernels.ops.paged_attention.reference import paged_attention_reference
from kernels.ops.store_kv.gpu import KVBlocks
from kernels.tools.checks.case import Check, assert_near, generator, poisoned_outputs


@dataclass(frozen=True, slots=True)
class AttentionCase:
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    dtype: torch.dtype
    rows: tuple[tuple[int, int], ...]
    """(new tokens, context with them); decoding rows, those of one token, first"""
    window: int | None = None
    kv_dtype: torch.dtype | None = None

    @property
    def num_decode_rows(self) -> int:
        return len(list(takewhile(lambda row: row[0] == 1, self.rows)))


def check_attention(device: torch.device, case: AttentionCase) -> None:
    """Blocks lie in random order; K/V that no row may see is NaN, and so is memory that is not written."""
    random = generator(case.head_dim + case.block_size)
    batch, used = make_batch(case.rows, case.block_size, case.num_decode_rows, random)
    kv = _poisoned_pool(case, used, random)
    num_tokens = sum(new for new, _ in case.rows)
    query = torch.randn(num_tokens, case.num_heads, case.head_dim, generator=random).to(case.dtype)
    scale = case.head_dim**-0.5
    # One value per lane turns the reference's packed layout into ours.
    expected = paged_attention_reference(
        query.float(),
        kv.key.float().transpose(2, 3).unsqueeze(-1) * kv.key_scale,
        kv.value.float().unsqueeze(-1) * kv.value_scale,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        scale,
        case.window,
    )
    on_device = KVBlocks(kv.key.to(device), kv.value.to(device), kv.key_scale, kv.value_scale)
    with poisoned_outputs():
        actual = paged_attention(
            query.to(device), on_device, move_batch(batch, device), scale=scale, window=case.window
        )
    assert_near(actual, expected, "attention")


def make_batch(
    rows: Sequence[tuple[int, int]], block_size: int, num_decode_rows: int, random: torch.Generator
) -> tuple[ForwardBatch, list[tuple[int, int]]]:
    """Return a batch on the host, and (block, number of tokens in it) for every block that a row has."""
    widths = [-(-context // block_size) for _, context in rows]
    order = torch.randperm(sum(widths) + 2, generator=random).tolist()
    tables = torch.zeros((len(rows), max(widths) + 1), dtype=torch.int32)
    used: list[tuple[int, int]] = []
    for row, (_, context) in enumerate(rows):
        blocks = [order.pop() for _ in range(widths[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        used += [(block, min(block_size, context - i * block_size)) for i, block in enumerate(blocks)]
    new_tokens = torch.tensor([new for new, _ in rows])
    none = torch.empty(0, dtype=torch.int64)
    query_start = torch.cat((torch.zeros(1, dtype=torch.int64), new_tokens.cumsum(0))).to(torch.int32)
    context_lens = torch.tensor([context for _, context in rows], dtype=torch.int32)
    return ForwardBatch(none, none, none, tables, query_start, context_lens, none, num_decode_rows), used


def move_batch(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    return ForwardBatch(
        batch.token_ids.to(device),
        batch.positions.to(device),
        batch.slot_mapping.to(device),
        batch.block_tables.to(device),
        batch.query_start.to(device),
        batch.context_lens.to(device),
        batch.sample_indices.to(device),
        batch.num_decode_rows,
    )


def _poisoned_pool(case: AttentionCase, used: Sequence[tuple[int, int]], random: torch.Generator) -> KVBlocks:
    shape = (len(used) + 2, case.num_kv_heads, case.block_size, case.head_dim)
    pools = []
    for _ in range(2):
        pool = torch.full(shape, torch.nan)
        for block, num_slots in used:
            pool[block, :, :num_slots] = torch.randn(
                case.num_kv_heads, num_slots, case.head_dim, generator=random
            )
        pools.append(pool.to(case.kv_dtype or case.dtype))
    scales = (0.5, 2.0) if case.kv_dtype is not None else (1.0, 1.0)
    return KVBlocks(pools[0], pools[1], *scales)


_MIXED = ((1, 1), (1, 16), (1, 17), (1, 300), (5, 5), (40, 57), (3, 35))
"""A lone token, block edges, a second split, an empty prefix, a chunk after a prefix, a short tail."""

ATTENTION_CASES = (
    AttentionCase(64, 9, 3, 16, torch.float32, _MIXED),
    AttentionCase(64, 9, 3, 16, torch.bfloat16, _MIXED),
    AttentionCase(80, 4, 4, 32, torch.bfloat16, ((1, 31), (1, 33), (70, 70))),
    AttentionCase(96, 8, 1, 64, torch.float16, ((1, 64), (20, 84), (1, 1))),
    AttentionCase(128, 8, 2, 16, torch.bfloat16, ((1, 257), (1, 512), (33, 40))),
    AttentionCase(256, 4, 2, 32, torch.float32, ((1, 31), (17, 50))),
    AttentionCase(64, 14, 2, 16, torch.float32, ((1, 40), (19, 19), (2, 33))),
    AttentionCase(64, 32, 1, 16, torch.float32, ((1, 5), (9, 12))),
    AttentionCase(64, 4, 2, 16, torch.float32, ((1, 300), (1, 20), (70, 90), (10, 74)), window=20),
    AttentionCase(64, 4, 2, 16, torch.float32, ((1, 600),), window=1),
    AttentionCase(64, 4, 2, 16, torch.float32, ((130, 130),)),
    AttentionCase(64, 4, 2, 16, torch.bfloat16, ((1, 40), (12, 30)), kv_dtype=torch.float8_e4m3fn),
    AttentionCase(128, 4, 4, 32, torch.float16, ((1, 40), (12, 30)), kv_dtype=torch.float8_e5m2),
)

CASES = tuple(
    Check(
        f"attention-d{case.head_dim}-{case.num_heads}:{case.num_kv_heads}-b{case.block_size}-"
        f"{case.kv_dtype or case.dtype}-{idx}",
        ("paged_decode", "paged_prefill"),
        partial(check_attention, case=case),
    )
    for idx, case in enumerate(ATTENTION_CASES)
)
