"""Conversions between float32 and bfloat16 that LLVM turns into SIMD in a loop. NaN passes through all of them."""

# ruff: noqa: ARG001 -- Numba fixes the arguments of an intrinsic and of its generator
from typing import Any

import numpy as np

from kernels.ops.cpu.features import processor_features
from kernels.ops.cpu.intrinsics import I16, float_of
from kernels.ops.cpu.jit import Float, intrinsic, jit_inline, types
from kernels.ops.cpu.vectors import BFloat, rounded_bits


@intrinsic
def to_bf16(typing_context: Any, x: Any) -> Any:
    """The bits of a float32 rounded to bfloat16, to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if "avx512bf16" not in processor_features():
            # Otherwise LLVM would call a library function that does not exist here.
            return builder.trunc(rounded_bits(builder, arguments[0]), I16)
        return builder.bitcast(builder.fptrunc(arguments[0], BFloat()), I16)

    return types.uint16(types.float32), generate


@jit_inline
def from_bf16(half: int) -> Float:
    return float_of(np.uint32(half) << np.uint32(16))
