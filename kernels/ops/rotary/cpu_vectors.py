"""Rotary and the write into the pool, 16 numbers of a head at a time; addresses are 4-byte aligned."""

# ruff: noqa: ARG001 -- Numba fixes the arguments of an intrinsic and of its generator
from typing import Any

from llvmlite import ir

from kernels.ops.cpu.intrinsics import I32
from kernels.ops.cpu.jit import intrinsic, types
from kernels.ops.cpu.vectors import (
    INTS,
    LANES,
    counted_loop,
    element,
    fma,
    load,
    number,
    prefetch_line,
    store,
    to_bf16,
)

_PAIRS = LANES // 2


@intrinsic
def rotate_halves(typing_context: Any, x: Any, half: Any, cos: Any, sin: Any) -> Any:
    """Rotate float32 x[2 * half] in place by angles [half]; half is a positive multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, half, cos, sin = arguments
        upper = element(builder, x, half)

        def body(index: Any, values: list[Any]) -> list[Any]:
            first, second = element(builder, x, index), element(builder, upper, index)
            a, b = load(builder, first, align=4), load(builder, second, align=4)
            c = load(builder, element(builder, cos, index), align=4)
            s = load(builder, element(builder, sin, index), align=4)
            store(builder, fma(builder, a, c, builder.fneg(builder.fmul(b, s))), first, align=4)
            store(builder, fma(builder, b, c, builder.fmul(a, s)), second, align=4)
            return []

        counted_loop(builder, half, [], body, LANES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def narrow_head(typing_context: Any, x: Any, size: Any, out: Any) -> Any:
    """bfloat16 out[size] from float32; size is a positive multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, size, out = arguments

        def body(index: Any, values: list[Any]) -> list[Any]:
            value = load(builder, element(builder, x, index), align=4)
            store(builder, to_bf16(builder, value), element(builder, out, index, 2), align=2)
            return []

        counted_loop(builder, size, [], body, LANES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def store_pairs(typing_context: Any, x: Any, size: Any, out: Any, stride: Any) -> Any:
    """Pairs of bfloat16 from float32 x[size], `stride` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, size, out, stride = arguments

        def body(index: Any, values: list[Any]) -> list[Any]:
            half = to_bf16(builder, load(builder, element(builder, x, index), align=4))
            pairs = builder.bitcast(half, ir.VectorType(I32, _PAIRS))
            first = builder.add(out, builder.mul(builder.lshr(index, number(1)), stride))
            for pair in range(_PAIRS):
                target = builder.add(first, builder.mul(stride, number(pair)))
                store(builder, builder.extract_element(pairs, ir.Constant(I32, pair)), target, align=4)
            return []

        counted_loop(builder, size, [], body, LANES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _interleave(lower: bool, upper: bool) -> Any:
    @intrinsic
    def interleave(typing_context: Any, first: Any, second: Any, size: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first, second, size, out = arguments
            sixteen = ir.Constant(INTS, [16] * LANES)

            def bits(base: Any, index: Any) -> Any:
                value = load(builder, element(builder, base, index), align=4)
                return builder.zext(to_bf16(builder, value), INTS)

            def body(index: Any, values: list[Any]) -> list[Any]:
                target = element(builder, out, index)
                if lower:
                    pairs = bits(first, index)
                else:
                    before = load(builder, target, INTS, align=4)
                    pairs = builder.and_(before, ir.Constant(INTS, [0xFFFF] * LANES))
                if upper:
                    pairs = builder.or_(pairs, builder.shl(bits(second, index), sixteen))
                store(builder, pairs, target, align=4)
                return []

            counted_loop(builder, size, [], body, LANES)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return interleave


store_both, store_first, store_second = (
    _interleave(lower=True, upper=True),
    _interleave(lower=True, upper=False),
    _interleave(lower=False, upper=True),
)
"""bfloat16 pairs out[size, 2] from float32 first[size] and second[size]: both; second 0; first unchanged."""


@intrinsic
def ask_for_lines(typing_context: Any, first: Any, stride: Any, count: Any) -> Any:
    """Start loading `count` > 0 cache lines, `stride` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, stride, count = arguments

        def body(index: Any, values: list[Any]) -> list[Any]:
            prefetch_line(builder, builder.add(first, builder.mul(index, stride)))
            return []

        counted_loop(builder, count, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate
