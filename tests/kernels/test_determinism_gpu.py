"""What ops/decisions/0009-determinism.md says of the GPU, in Triton's interpreter: level 1, attention to the bit."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kernels.batch import ForwardBatch
from kernels.ops.paged_attention.gpu import paged_attention
from kernels.ops.store_kv.gpu import KVBlocks
from kernels.runtime.gpu.step_inputs import StepInputs
from kernels.sampling.gpu.sampler import GpuSampler
from kernels.tools.checks.attention import make_batch, move_batch
from kernels.tools.checks.sampling import make_params
from scheduler.plan import RowResult, ScheduledRow

CPU = torch.device("cpu")
VOCAB, SLOTS, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 70, 16, 16, 4, 2, 16


def rows_of_all_kinds() -> list[ScheduledRow]:
    return [
        ScheduledRow(
            f"r{slot}",
            slot,
            (1,),
            40 + slot,
            (0,),
            params,
            3,
            ((1, 2, 3), (4, 4, 5)) if params.needs_history else None,
        )
        for slot, params in enumerate(make_params(VOCAB))
    ]


def sample(logits: torch.Tensor, rows: list[ScheduledRow]) -> list[RowResult]:
    """Sample with a new sampler."""
    return GpuSampler(VOCAB, StepInputs(CPU, SLOTS)).sample(logits, rows)


def test_level_1_a_draw_depends_on_nothing_but_its_own_row() -> None:
    """Bit for bit, log-probabilities included: alone, among others, in another order, at another slot."""
    rows = rows_of_all_kinds()
    logits = 3 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(3))
    together = sample(logits, rows)
    order = list(reversed(range(len(rows))))

    assert sample(logits[order], [rows[idx] for idx in order])[::-1] == together
    moved = [replace(row, slot=(row.slot + 5) % SLOTS) for row in rows]
    assert sample(logits, moved) == together
    for idx, row in enumerate(rows):
        assert sample(logits[idx : idx + 1], [row]) == [together[idx]]


LENGTHS = ((1, 30), (1, 700), (1, 300), (40, 90), (3, 3))
"""(new tokens, context): one, two and three splits of the decode kernel, and a chunk that fills several tiles."""


def check_attention_alone(
    device: torch.device,
    lengths: Sequence[tuple[int, int]],
    window: int | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Each row's attention is bit-identical alone and among other rows."""
    generator = torch.Generator().manual_seed(4)
    batch, _ = make_batch(lengths, BLOCK_SIZE, sum(new == 1 for new, _ in lengths), generator)
    num_blocks = int(batch.block_tables.max()) + 3
    shape = (num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    kv = KVBlocks(*(torch.randn(shape, generator=generator).to(device, dtype) for _ in "kv"))
    query = torch.randn(sum(new for new, _ in lengths), HEADS, HEAD_DIM, generator=generator).to(
        device, dtype
    )
    together = paged_attention(query, kv, move_batch(batch, device), scale=0.25, window=window)

    for row in range(len(lengths)):
        own = slice(int(batch.query_start[row]), int(batch.query_start[row + 1]))
        one = move_batch(only(batch, row), device)
        alone = paged_attention(query[own].contiguous(), kv, one, scale=0.25, window=window)
        assert torch.equal(alone, together[own]), lengths[row]


@pytest.mark.parametrize("window", [None, 100])
def test_attention_of_a_row_is_equal_to_the_bit_alone_and_among_neighbours(window: int | None) -> None:
    check_attention_alone(CPU, LENGTHS, window)


def only(batch: ForwardBatch, row: int) -> ForwardBatch:
    """The batch without its other rows; its table is as wide as this row needs."""
    width = -(-int(batch.context_lens[row]) // BLOCK_SIZE)
    return replace(
        batch,
        block_tables=batch.block_tables[row : row + 1, :width].contiguous(),
        query_start=(batch.query_start[row : row + 2] - batch.query_start[row]).contiguous(),
        context_lens=batch.context_lens[row : row + 1],
        num_decode_rows=int(row < batch.num_decode_rows),
    )
