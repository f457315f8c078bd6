"""Norms and quantization of float32 rows, 16 numbers at a time.

As loops they would compile to several times as many instructions. `size` is a positive multiple of 16
everywhere, addresses are 4-byte aligned (of bfloat16 2, of codes 1), and outputs may be the inputs of the same width.
"""

# ruff: noqa: ARG001 -- Numba fixes the arguments of an intrinsic and of its generator
from typing import Any

from llvmlite import ir

from kernels.ops.cpu.intrinsics import I8, I16, I32
from kernels.ops.cpu.jit import intrinsic, types
from kernels.ops.cpu.vectors import (
    FLOATS,
    INTS,
    LANES,
    across,
    counted_loop,
    element,
    fma,
    load,
    splat,
    spread,
    store,
    to_bf16,
)


def _larger_bits(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _scale_row(narrow: bool) -> Any:
    @intrinsic
    def scale(typing_context: Any, x: Any, gain: Any, size: Any, factor: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, gain, size, factor, out = arguments
            factors = spread(builder, factor, FLOATS)

            def body(index: Any, values: list[Any]) -> list[Any]:
                value = builder.fmul(load(builder, element(builder, x, index), align=4), factors)
                value = builder.fmul(value, load(builder, element(builder, gain, index), align=4))
                if narrow:
                    store(builder, to_bf16(builder, value), element(builder, out, index, 2), align=2)
                else:
                    store(builder, value, element(builder, out, index), align=4)
                return []

            counted_loop(builder, size, [], body, LANES)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.float32, types.int64), generate

    return scale


scale_row, scale_row_to_bf16 = _scale_row(narrow=False), _scale_row(narrow=True)
"""out[size] = x[size] * factor * gain[size], in float32 or rounded to bfloat16."""


@intrinsic
def widen_row(typing_context: Any, half: Any, size: Any, out: Any) -> Any:
    """float32 out[size] from bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half, size, out = arguments

        def body(index: Any, values: list[Any]) -> list[Any]:
            lanes = load(builder, element(builder, half, index, 2), ir.VectorType(I16, LANES), align=2)
            wide = builder.shl(builder.zext(lanes, INTS), ir.Constant(INTS, [16] * LANES))
            store(builder, wide, element(builder, out, index), align=4)
            return []

        counted_loop(builder, size, [], body, LANES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def peak_bits(typing_context: Any, x: Any, size: Any) -> Any:
    """The bits of the largest |x|; as integers they order like |x|, with NaN above infinity."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, size = arguments

        def body(index: Any, values: list[Any]) -> list[Any]:
            lanes = load(builder, element(builder, x, index), INTS, align=4)
            size_only = builder.and_(lanes, ir.Constant(INTS, [0x7FFFFFFF] * LANES))
            return [_larger_bits(builder, size_only, values[0])]

        largest = counted_loop(builder, size, [ir.Constant(INTS, [0] * LANES)], body, LANES)[0]
        return across(builder, largest, _larger_bits)

    return types.uint32(types.int64, types.int64), generate


@intrinsic
def encode_row(typing_context: Any, x: Any, size: Any, inverse: Any, out: Any) -> Any:
    """uint8 out[size] = round(x * inverse) + 128; values that are not finite give an arbitrary code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, size, inverse, out = arguments
        truncate = builder.module.declare_intrinsic(
            "llvm.x86.avx512.mask.cvttps2dq.512", (), ir.FunctionType(INTS, [FLOATS, INTS, I16, I32])
        )
        undefined, all_lanes, current_rounding = ir.Constant(INTS, ir.Undefined), ir.Constant(I16, -1), 4
        inverses = spread(builder, inverse, FLOATS)

        def body(index: Any, values: list[Any]) -> list[Any]:
            value = load(builder, element(builder, x, index), align=4)
            shifted = fma(builder, value, inverses, splat(128.5))
            whole = builder.call(
                truncate, [shifted, undefined, all_lanes, ir.Constant(I32, current_rounding)]
            )
            store(builder, builder.trunc(whole, ir.VectorType(I8, LANES)), builder.add(out, index), align=1)
            return []

        counted_loop(builder, size, [], body, LANES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate
