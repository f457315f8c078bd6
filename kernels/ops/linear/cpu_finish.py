"""Epilogues of a product, for one row of a tile: store, add, silu(gate) · up, or gelu(gate) · up.

A scalar loop over the columns would take up to a tenth of the product's time.
"""

# ruff: noqa: ARG001 -- Numba fixes the arguments of an intrinsic and of its generator
import math
from typing import Any

from kernels.ops.cpu.jit import intrinsic, types
from kernels.ops.cpu.vectors import exp2, fma, load, number, splat, store, to_bf16

_GELU_SLOPE = -2 * math.sqrt(2 / math.pi) * math.log2(math.e)
_GELU_CUBE = 0.044715 * _GELU_SLOPE


@intrinsic
def silu_mul_16(typing_context: Any, gate: Any, up: Any, out: Any) -> Any:
    """bfloat16 out[16] from float32 gate[16] and up[16], both 64-byte aligned."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gate, up, out = arguments
        x = load(builder, gate)
        # The power is infinite below -128 / log2(e): then the quotient is 0, as it should be.
        power = exp2(builder, builder.fmul(x, splat(-math.log2(math.e))), terms=6)
        quotient = builder.fdiv(x, builder.fadd(power, splat(1.0)))
        store(builder, to_bf16(builder, builder.fmul(quotient, load(builder, up))), out, align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def gelu_mul_16(typing_context: Any, gate: Any, up: Any, out: Any) -> Any:
    """Like silu_mul_16 with the tanh form of gelu, x · (1 + tanh(u)) / 2 = x / (1 + e^-2u)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gate, up, out = arguments
        x = load(builder, gate)
        # u = √(2/π) · (x + 0.044715 x³), in powers of two. Where the cube overflows, the power is 0 or infinite.
        bend = fma(builder, builder.fmul(x, x), splat(_GELU_CUBE), splat(_GELU_SLOPE))
        power = exp2(builder, builder.fmul(x, bend), terms=6)
        quotient = builder.fdiv(x, builder.fadd(power, splat(1.0)))
        store(builder, to_bf16(builder, builder.fmul(quotient, load(builder, up))), out, align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _move_32(adding: bool) -> Any:
    @intrinsic
    def move(typing_context: Any, row: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            for offset in (0, 64):
                source, target = (builder.add(address, number(offset)) for address in arguments)
                value = load(builder, source)
                if adding:
                    value = builder.fadd(load(builder, target, align=4), value)
                store(builder, value, target, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return move


store_32, add_32 = _move_32(adding=False), _move_32(adding=True)
"""float32 out[32] = row, or out += row; row is 64-byte aligned."""
