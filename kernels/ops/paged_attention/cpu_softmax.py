"""Online softmax of one query row over one segment of keys (Milakov and Gimelshein 2018)."""

# ruff: noqa: ARG001 -- Numba fixes the arguments of an intrinsic and of its generator
from typing import Any

from llvmlite import ir

from kernels.ops.cpu.intrinsics import F32, I32
from kernels.ops.cpu.jit import intrinsic, types
from kernels.ops.cpu.product import Product, bf16_product, left_bytes
from kernels.ops.cpu.vectors import (
    FLOATS,
    LANES,
    across,
    counted_loop,
    element,
    exp2,
    fma,
    larger,
    load,
    splat,
    spread,
    store,
    to_bf16,
)


def _first(builder: Any, lanes: Any) -> Any:
    return builder.extract_element(lanes, ir.Constant(I32, 0))


@intrinsic
def row_peak(typing_context: Any, scores: Any, count: Any) -> Any:
    """Largest of `count` float32 (a positive multiple of 16, 64-byte aligned); NaN is ignored."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, count = arguments

        def largest(index: Any, values: list[Any]) -> list[Any]:
            return [larger(builder, load(builder, element(builder, scores, index)), values[0])]

        return across(
            builder, counted_loop(builder, count, [splat(float("-inf"))], largest, LANES)[0], larger
        )

    return types.float32(types.int64, types.int64), generate


@intrinsic
def update_peaks(typing_context: Any, found: Any, scale: Any, peaks: Any, factors: Any) -> Any:
    """For 16 rows: peaks = larger of found * scale and peaks; factors = 2^(previous peaks - peaks)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found, scale, peaks, factors = arguments
        scaled = builder.fmul(load(builder, found), spread(builder, scale, FLOATS))
        before = load(builder, peaks, align=4)
        after = larger(builder, scaled, before)
        store(builder, after, peaks, align=4)
        store(builder, exp2(builder, builder.fsub(before, after)), factors, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), generate


@intrinsic
def weigh_row(
    typing_context: Any, scores: Any, count: Any, scale: Any, peak: Any, factor: Any, weights: Any, sums: Any
) -> Any:
    """weights[count] = 2^(scores * scale - peak); float32 sums[16] = sums * factor + weights, lane by lane.

    Weights are what the tile reads, bfloat16 or float32 (see left_size). count is a positive multiple of 16; scores and
    sums are 64-byte aligned, weights 32. A masked score is -infinity.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, count, scale, peak, factor, weights, sums = arguments
        scales, peaks = spread(builder, scale, FLOATS), spread(builder, builder.fneg(peak), FLOATS)

        def weigh(index: Any, values: list[Any]) -> list[Any]:
            lanes = load(builder, element(builder, scores, index))
            weight = exp2(builder, fma(builder, lanes, scales, peaks))
            size = left_bytes()
            left = weight if bf16_product() is Product.FMA else to_bf16(builder, weight)
            store(builder, left, element(builder, weights, index, size), align=32)
            return [builder.fadd(values[0], weight)]

        total = counted_loop(builder, count, [splat(0.0)], weigh, LANES)[0]
        store(builder, fma(builder, load(builder, sums), spread(builder, factor, FLOATS), total), sums)
        return context.get_dummy_value()

    arguments = (types.int64, types.int64, *[types.float32] * 3, types.int64, types.int64)
    return types.void(*arguments), generate


@intrinsic
def merge_row(
    typing_context: Any,
    output: Any,
    sums: Any,
    peak: Any,
    part: Any,
    part_sums: Any,
    part_peak: Any,
    size: Any,
) -> Any:
    """Merge float32 output[size], sums[16] and peak of a later span of keys into those of a row.

    All are addresses; size is a positive multiple of 16; outputs and sums are 64-byte aligned.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        output, sums, peak, part, part_sums, part_peak, size = arguments
        before, others = load(builder, peak, F32, align=4), load(builder, part_peak, F32, align=4)
        after = larger(builder, others, before)
        keep = exp2(builder, spread(builder, builder.fsub(before, after), FLOATS))
        take = exp2(builder, spread(builder, builder.fsub(others, after), FLOATS))

        def blend(target: Any, source: Any) -> None:
            added = builder.fmul(load(builder, source), take)
            store(builder, fma(builder, load(builder, target), keep, added), target)

        def blend_output(index: Any, values: list[Any]) -> list[Any]:
            blend(element(builder, output, index), element(builder, part, index))
            return []

        counted_loop(builder, size, [], blend_output, LANES)
        blend(sums, part_sums)
        store(builder, after, peak, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@intrinsic
def finish_row(typing_context: Any, output: Any, sums: Any, size: Any, out: Any) -> Any:
    """bfloat16 out[size] = output[size] / sum of the weights."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        output, sums, size, out = arguments
        total = across(builder, load(builder, sums), lambda builder, a, b: builder.fadd(a, b))
        inverses = spread(builder, builder.fdiv(ir.Constant(F32, 1.0), total), FLOATS)

        def divide(index: Any, values: list[Any]) -> list[Any]:
            value = builder.fmul(load(builder, element(builder, output, index)), inverses)
            store(builder, to_bf16(builder, value), element(builder, out, index, 2), align=2)
            return []

        counted_loop(builder, size, [], divide, LANES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
