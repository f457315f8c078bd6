"""RMS norm on the GPU, with the residual addition before it: one program per row, fp32 inside."""

# ruff: noqa: N803  compile-time parameters are upper case, as everywhere in Triton

import torch
import triton.language as tl

from kernels.ops.gpu.jit import kernel
from kernels.ops.gpu.tuning import launch_config, next_power_of_two


@kernel()
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    branch_weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        branch_scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / SIZE + eps)
        branch_gain = tl.load(branch_weight + columns, mask=mask, other=0.0).to(tl.float32)
        value = (value * branch_scale * branch_gain).to(x.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * SIZE + columns, rounded, mask=mask)
        # The next layer adds to the stored value, so the norm is computed from exactly that.
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    gain = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (value * scale * gain).to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    branch_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalize rows of `x` [num_tokens, size]; return them in the same shape and float type.

    `residual` (same shape and type) first becomes x + residual, in place, and is what is normalized. With
    `branch_weight` x is normalized with that weight before the addition (Gemma 3). Weights are [size]. Rows of `x` may
    be strided.
    """
    num_tokens, size = x.shape
    assert x.stride(1) == 1
    assert weight.shape == (size,)
    assert branch_weight is None or branch_weight.shape == (size,)
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = next_power_of_two(size)
    bucket = "n1024" if block <= 1024 else "n4096" if block <= 4096 else "n16384"
    config = launch_config("rms_norm", bucket, x.device)
    arguments = {
        "x": x,
        "residual": x if residual is None else residual,
        "weight": weight,
        "branch_weight": weight if branch_weight is None else branch_weight,
        "out": out,
        "eps": eps,
        "x_stride": x.stride(0),
        "SIZE": size,
        "BLOCK": block,
        "HAS_RESIDUAL": residual is not None,
        "HAS_BRANCH": branch_weight is not None,
    }
    _rms_norm_kernel.launch((num_tokens,), arguments, num_warps=config.num_warps)
    return out
