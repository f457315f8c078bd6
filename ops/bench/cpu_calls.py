"""Calls of single compiled CPU functions on tensors, on the caller's thread: products, quantization, attention."""

from collections.abc import Callable

import numpy as np
import torch

from kernels.ops.cpu.tasks import PHASE_BYTES
from kernels.ops.linear.cpu import GELU_MUL, SILU_MUL, STORE, describe, linear_phase
from kernels.ops.linear.cpu import scratch_bytes as linear_scratch_bytes
from kernels.ops.linear.packing import PackedLinear
from kernels.ops.paged_attention.cpu import ALL_SPANS, attend, scratch_bytes
from kernels.ops.rms_norm.cpu import quantize_phase


def lone_phase() -> torch.Tensor:
    """Counters for a single phase that the caller runs on its own thread."""
    return torch.zeros(PHASE_BYTES, dtype=torch.uint8)


def prepare_linear(x: torch.Tensor, packed: PackedLinear, mode: int = STORE) -> Callable[[], torch.Tensor]:
    """A function that computes the product; it can be called repeatedly, and the input is converted beforehand."""
    a, scales = (x.bfloat16().contiguous(), None) if packed.scales is None else quantize(x, packed.num_groups)
    if mode in (SILU_MUL, GELU_MUL):
        out = torch.empty(x.shape[0], packed.num_outputs // 2, dtype=torch.bfloat16)
    else:
        out = torch.empty(x.shape[0], packed.num_outputs, dtype=torch.float32)
    description = torch.tensor(describe(packed), dtype=torch.int64)
    scratch, phase = torch.empty(linear_scratch_bytes(packed.num_inputs), dtype=torch.uint8), lone_phase()

    def run() -> torch.Tensor:
        phase.zero_()
        linear_phase(
            description.data_ptr(),
            mode,
            a.shape[0],
            a.data_ptr(),
            a.stride(0) * a.itemsize,
            0 if scales is None else scales.data_ptr(),
            out.data_ptr(),
            out.stride(0) * out.itemsize,
            scratch.data_ptr(),
            phase.data_ptr(),
        )
        return out

    return run


def quantize(x: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes (value / scale + 128) of x [num_tokens, size], and scales [num_tokens, num_groups]."""
    half = x.bfloat16().contiguous()
    rows, size = half.shape
    codes = torch.empty(rows, size, dtype=torch.uint8)
    scales = torch.empty(rows, num_groups, dtype=torch.float32)
    scratch, phase = torch.empty(size, dtype=torch.float32), lone_phase()
    quantize_phase(
        rows,
        half.data_ptr(),
        size,
        num_groups,
        codes.data_ptr(),
        size,
        scales.data_ptr(),
        scratch.data_ptr(),
        phase.data_ptr(),
    )
    return codes, scales


def attend_row(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    block_table: torch.Tensor,
    position: int,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of one row's bfloat16 queries [num_tokens, num_heads, head_dim] from `position` on.

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
