"""The gate of the MLP on the GPU: activation(gate) * up over the fused projection's output."""

# ruff: noqa: N803  compile-time parameters are upper case, as everywhere in Triton

import torch
import triton.language as tl

from kernels.ops.gpu.jit import kernel
from kernels.ops.gpu.tuning import launch_config


@kernel()
def _silu_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # The tanh form; tanh(y) = 2 sigmoid(2y) - 1, hence gate * sigmoid(2y).
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + row * SIZE + columns, (gate * up).to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor, *, gelu_tanh: bool = False) -> torch.Tensor:
    """Return silu(gate) * up, [num_tokens, size], for `gate_up` [num_tokens, 2 * size], gate first, any float type.

    With `gelu_tanh`, gelu in its tanh form replaces silu."""
    num_tokens, double = gate_up.shape
    assert double % 2 == 0
    assert gate_up.stride(1) == 1
    size = double // 2
    out = gate_up.new_empty((num_tokens, size))
    config = launch_config("silu_mul", "any", gate_up.device)
    arguments = {
        "gate_up": gate_up,
        "out": out,
        "stride": gate_up.stride(0),
        "SIZE": size,
        "BLOCK": config.block_n,
        "GELU": gelu_tanh,
    }
    _silu_mul_kernel.launch((num_tokens, -(-size // config.block_n)), arguments, num_warps=config.num_warps)
    return out
