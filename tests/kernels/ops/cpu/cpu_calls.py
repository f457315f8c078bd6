"""Calls of single compiled CPU functions on tensors, on the caller's thread; others are in ops.bench.cpu_calls."""

import numpy as np
import torch

from kernels.ops.linear.cpu import GELU_MUL, SILU_MUL
from kernels.ops.linear.packing import PackedLinear
from kernels.ops.rms_norm.cpu import add_norm_phase, rms_norm_phase
from kernels.ops.rotary.cpu import rotate_and_store_phase
from ops.bench.cpu_calls import lone_phase, prepare_linear


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """x [num_tokens, num_inputs] times the packed weight: [num_tokens, num_outputs] float32."""
    return prepare_linear(x, packed)()


def gate_up_silu_mul(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """silu(gate) · up of a weight from `pack_gate_up`: [num_tokens, num_outputs / 2] bfloat16."""
    return prepare_linear(x, packed, SILU_MUL)()


def gate_up_gelu_mul(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """gelu(gate) · up in its tanh form, otherwise as `gate_up_silu_mul`."""
    return prepare_linear(x, packed, GELU_MUL)()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, index: torch.Tensor | None = None
) -> torch.Tensor:
    """Norm of float32 x[index] [num_tokens, hidden] (all of x without an index) in bfloat16."""
    rows = x.shape[0] if index is None else index.shape[0]
    out = torch.empty(rows, x.shape[1], dtype=torch.bfloat16)
    scratch, phase = torch.empty(x.shape[1], dtype=torch.float32), lone_phase()
    rms_norm_phase(
        rows,
        0 if index is None else index.data_ptr(),
        x.data_ptr(),
        x.shape[1],
        weight.data_ptr(),
        int(np.float32(eps).view(np.uint32)),
        0,
        out.data_ptr(),
        out.stride(0) * 2,
        0,
        scratch.data_ptr(),
        phase.data_ptr(),
    )
    return out


def add_norm(
    x: torch.Tensor,
    branch: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm in bfloat16 of float32 x + norm(branch) [num_tokens, hidden], at the rows of `index` where there is one.

    weights: the branch's norm and the sum's. Without an index x becomes the sum.
    """
    rows, size = x.shape[0] if index is None else index.shape[0], x.shape[1]
    out = torch.empty(rows, size, dtype=torch.bfloat16)
    scratch, phase = torch.empty(2 * size, dtype=torch.float32), lone_phase()
    add_norm_phase(
        rows,
        0 if index is None else index.data_ptr(),
        x.data_ptr(),
        size,
        branch.data_ptr(),
        weights[0].data_ptr(),
        weights[1].data_ptr(),
        int(np.float32(eps).view(np.uint32)),
        0,
        out.data_ptr(),
        out.stride(0) * 2,
        0,
        scratch.data_ptr(),
        phase.data_ptr(),
    )
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    num_heads: int,
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    slot_mapping: torch.Tensor,
    gains: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotated queries of float32 qkv [num_tokens, all heads, head_dim]; keys and values go into one layer's blocks.

    tables: cos and sin of every position; gains: norm weights of query and key heads. Overwrites qkv.
    """
    num_kv_heads, lanes, block_size = key_blocks.shape[1:4]
    query = torch.empty(qkv.shape[0], num_heads, lanes * 2, dtype=torch.bfloat16)
    phase = lone_phase()
    rotate_and_store_phase(
        qkv.shape[0],
        qkv.data_ptr(),
        num_heads,
        num_kv_heads,
        lanes * 2,
        tables[0].data_ptr(),
        tables[1].data_ptr(),
        positions.data_ptr(),
        gains[0].data_ptr() if gains else 0,
        gains[1].data_ptr() if gains else 0,
        int(np.float32(eps).view(np.uint32)),
        query.data_ptr(),
        key_blocks.data_ptr(),
        value_blocks.data_ptr(),
        key_blocks[0].nbytes,
        block_size,
        slot_mapping.data_ptr(),
        phase.data_ptr(),
    )
    return query
