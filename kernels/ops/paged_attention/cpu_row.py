"""The CPU kernel called on its own, for one row."""

import numpy as np
import torch

from kernels.ops.paged_attention.cpu import ALL_SPANS, attend, scratch_bytes


def attend_row(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    block_table: torch.Tensor,
    position: int,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of one row's bfloat16 queries [num_tokens, num_heads, head_dim] from `position` on; caller's thread.

    Tokens × heads per KV head may be at most MAX_QUERIES, unless the heads alone are more. block_table is int32.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, _, block_size = key_blocks.shape[1:4]
    group = num_heads // num_kv_heads
    out = torch.empty_like(query)
    scratch = torch.empty(scratch_bytes(group, head_dim), dtype=torch.uint8)
    attend(
        query.data_ptr(),
        num_heads * head_dim * 2,
        num_tokens,
        num_kv_heads,
        group,
        head_dim,
        position,
        window or 0,
        key_blocks.data_ptr(),
        value_blocks.data_ptr(),
        key_blocks[0].nbytes,
        block_size,
        block_table.data_ptr(),
        int(np.float32(head_dim**-0.5).view(np.uint32)),
        out.data_ptr(),
        ALL_SPANS,
        0,
        scratch.data_ptr(),
    )
    return out
