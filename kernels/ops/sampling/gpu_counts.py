"""Counts of tokens for the penalties, by slot on the device, updated when a row samples, not after it.

The token that a row samples is counted when its successor is sampled, and each slot remembers up to which position it
has counted. So a step that is run again counts nothing twice, and a token is never counted unless another step follows.
"""

# ruff: noqa: N803  compile-time parameters are upper case, as everywhere in Triton

from dataclasses import dataclass

import torch
import triton.language as tl

from kernels.ops.gpu.jit import kernel
from kernels.ops.gpu.tuning import launch_config


@kernel("history_start", "history_ids", "history_counts")
def _token_counts_kernel(
    slots: tl.tensor,
    positions: tl.tensor,
    ring: tl.tensor,
    counts: tl.tensor,
    counted: tl.tensor,
    history_start: tl.tensor,
    history_ids: tl.tensor,
    history_counts: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    RING: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
) -> None:
    line = tl.program_id(0)
    slot = tl.load(slots + line).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(positions + line)
    row = counts + slot * VOCAB
    begin = tl.load(history_start + line) if HAS_HISTORY else 0
    end = tl.load(history_start + line + 1) if HAS_HISTORY else 0
    if end > begin:
        for start in range(0, VOCAB, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(row + at, tl.zeros([BLOCK], tl.int32), mask=at < VOCAB)
        # Wait for the other threads of this program, which cleared what is written next.
        tl.debug_barrier()
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = at < end
            token = tl.load(history_ids + at, mask=mask, other=0)
            tl.store(row + token, tl.load(history_counts + at, mask=mask, other=0), mask=mask)
    else:
        done = tl.load(counted + slot)
        # The counts are ahead: the next step already ran and counted the token that this one samples again.
        is_behind = done < position
        newest = tl.where(is_behind, position - 1, position)
        token = tl.load(ring + slot * RING + newest % RING)
        change = tl.where(is_behind, 2, -2)
        tl.store(row + token, tl.load(row + token) + change, mask=done != position)
    tl.store(counted + slot, position)


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Counts on the device, changed in place."""

    counts: torch.Tensor
    """[num_slots, vocab_size] int32: twice the times generated, plus 1 if in the prompt"""
    counted: torch.Tensor
    """[num_slots] int64: tokens before this position are counted"""


@dataclass(frozen=True, slots=True)
class Histories:
    """Histories of the rows that reset their slot's counts; the tokens of a row are distinct."""

    start: torch.Tensor
    """[num_rows + 1] int32 into ids and counts; a row without tokens has no history"""
    ids: torch.Tensor
    """[n] int32"""
    counts: torch.Tensor
    """[n] int32, as in SlotCounts"""


def update_counts(
    slots: torch.Tensor,
    positions: torch.Tensor,
    ring: torch.Tensor,
    counts: SlotCounts,
    histories: Histories | None,
) -> None:
    """Make the counts of `slots` [num_rows] int32 (-1: none) hold every token before `positions` [num_rows] int64.

    `ring` [num_slots, positions] int32 has the tokens that were sampled for the latest positions of each slot. The
    counts may be one token behind a row's position or one ahead of it.
    """
    config = launch_config("token_counts", "any", counts.counts.device)
    arguments = {
        "slots": slots,
        "positions": positions,
        "ring": ring,
        "counts": counts.counts,
        "counted": counts.counted,
        "history_start": slots if histories is None else histories.start,
        "history_ids": slots if histories is None else histories.ids,
        "history_counts": slots if histories is None else histories.counts,
        "VOCAB": counts.counts.shape[1],
        "BLOCK": config.block_n,
        "RING": ring.shape[1],
        "HAS_HISTORY": histories is not None,
    }
    _token_counts_kernel.launch((slots.shape[0],), arguments, num_warps=config.num_warps)
