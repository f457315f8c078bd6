"""Scalar functions that LLVM turns into SIMD when a loop calls them. NaN passes through all of them."""

import math
from typing import Any

import numpy as np

from kernels.ops.cpu.intrinsics import bits_of, float_of
from kernels.ops.cpu.jit import Float, device

_LOG2_E = np.float32(math.log2(math.e))
_LOW, _HIGH = np.float32(-126.0), np.float32(126.0)
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
# 2^f on [-1/2, 1/2]: Taylor terms ln(2)^n / n!; the seventh is below float32's resolution there.
_C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(math.log(2.0) ** n / math.factorial(n)) for n in range(1, 7))


@device
def exp2(x: Float) -> Float:
    """2^x for x clamped to [-126, 126]."""
    # Not min and max: those may drop a NaN.
    x = _LOW if x < _LOW else x  # noqa: FURB136
    x = _HIGH if x > _HIGH else x  # noqa: FURB136
    whole = np.floor(x + _HALF)
    f = x - whole
    power = _ONE + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    return power * float_of(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@device
def silu(x: Float) -> Float:
    return x / (_ONE + exp2(-x * _LOG2_E))


@device
def to_bf16(x: Float) -> Any:
    """The upper half of a float32, rounded to nearest even."""
    bits = bits_of(np.float32(x))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@device
def from_bf16(half: int) -> Float:
    return float_of(np.uint32(half) << np.uint32(16))
