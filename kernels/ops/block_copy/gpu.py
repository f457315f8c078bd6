"""Copies of whole KV blocks on the GPU: between blocks of a pool, and to and from pinned host memory.

A pool is [num_layers, 2, num_blocks, ...]; a block's bytes are contiguous per layer and K/V and are moved as 32-bit
words, so the element type does not matter.
"""

# ruff: noqa: N803  compile-time parameters are upper case, as everywhere in Triton

import torch
import triton.language as tl

from kernels.ops.gpu.jit import kernel
from kernels.ops.gpu.tuning import launch_config


@kernel("source_ids", "target_ids")
def _block_copy_kernel(
    source: tl.tensor,
    target: tl.tensor,
    source_ids: tl.tensor,
    target_ids: tl.tensor,
    source_plane: tl.tensor,
    target_plane: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
) -> None:
    # Blocks are in x, the only dimension of a grid that may pass 65,535.
    item = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    source_id = tl.load(source_ids + item).to(tl.int64) if HAS_SOURCE_IDS else item
    target_id = tl.load(target_ids + item).to(tl.int64) if HAS_TARGET_IDS else item
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = words < WORDS
    value = tl.load(source + plane * source_plane + source_id * WORDS + words, mask=mask)
    tl.store(target + plane * target_plane + target_id * WORDS + words, value, mask=mask)


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    num_items: int,
) -> None:
    source, target = _as_words(source), _as_words(target)
    words = source.shape[-1]
    assert target.shape[-1] == words
    assert target.shape[0] == source.shape[0]
    config = launch_config("block_copy", "any", source.device)
    arguments = {
        "source": source,
        "target": target,
        "source_ids": source if source_ids is None else source_ids,
        "target_ids": target if target_ids is None else target_ids,
        "source_plane": source.stride(0),
        "target_plane": target.stride(0),
        "WORDS": words,
        "BLOCK": config.block_n,
        "HAS_SOURCE_IDS": source_ids is not None,
        "HAS_TARGET_IDS": target_ids is not None,
    }
    grid = (num_items, source.shape[0], -(-words // config.block_n))
    _block_copy_kernel.launch(grid, arguments, num_warps=config.num_warps)


def _as_words(pool: torch.Tensor) -> torch.Tensor:
    """[num_layers, 2, num_blocks, ...] as [num_layers * 2, num_blocks, 32-bit words], without a copy."""
    assert pool.is_contiguous()
    return pool.view(pool.shape[0] * 2, pool.shape[2], -1).view(torch.int32)


def copy_blocks(pool: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy block source_ids[i] onto target_ids[i] in every layer; no target may occur in another pair."""
    _copy(pool, pool, source_ids, target_ids, source_ids.numel())


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Lay the given blocks end to end in `staging` [num_layers, 2, num_ids, ...], for one copy to take out."""
    _copy(pool, staging, block_ids, None, block_ids.numel())


def scatter_blocks(staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """The reverse of `gather_blocks`."""
    _copy(staging, pool, None, block_ids, block_ids.numel())


def swap_out(pool: torch.Tensor, block_ids: torch.Tensor, host: torch.Tensor) -> None:
    """Start copying blocks to `host` (pinned, [num_layers, 2, num_ids, ...]), filled when the stream gets there."""
    staging = torch.empty(host.shape, dtype=pool.dtype, device=pool.device)
    gather_blocks(pool, block_ids, staging)
    host.copy_(staging, non_blocking=True)


def swap_in(host: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Start copying blocks back; `host` may be reused when the stream got there."""
    staging = host.to(pool.device, non_blocking=True)
    scatter_blocks(staging, pool, block_ids)
