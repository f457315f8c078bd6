"""Copies of whole KV blocks within a pool on the GPU.

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
    pool: tl.tensor,
    source_ids: tl.tensor,
    target_ids: tl.tensor,
    plane_words: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Blocks are in x, the only dimension of a grid that may pass 65,535.
    item = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    source_id = tl.load(source_ids + item).to(tl.int64)
    target_id = tl.load(target_ids + item).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = words < WORDS
    value = tl.load(pool + plane * plane_words + source_id * WORDS + words, mask=mask)
    tl.store(pool + plane * plane_words + target_id * WORDS + words, value, mask=mask)


def copy_blocks(pool: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy block source_ids[i] onto target_ids[i] in every layer; no target may occur in another pair.

    source_ids and target_ids are [num_pairs] int32 on the pool's device.
    """
    assert pool.is_contiguous()
    # [num_layers * 2, num_blocks, 32-bit words], without a copy
    planes = pool.view(pool.shape[0] * 2, pool.shape[2], -1).view(torch.int32)
    words = planes.shape[-1]
    config = launch_config("block_copy", "any", pool.device)
    arguments = {
        "pool": planes,
        "source_ids": source_ids,
        "target_ids": target_ids,
        "plane_words": planes.stride(0),
        "WORDS": words,
        "BLOCK": config.block_n,
    }
    grid = (source_ids.numel(), planes.shape[0], -(-words // config.block_n))
    _block_copy_kernel.launch(grid, arguments, num_warps=config.num_warps)
