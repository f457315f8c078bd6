"""The tiles that kernels call, one function for each kind and width."""

# ruff: noqa: ARG001 -- Numba fixes the arguments of an intrinsic and of its generator
from typing import Any

from kernels.ops.cpu.features import processor_features
from kernels.ops.cpu.jit import intrinsic, types
from kernels.ops.cpu.product import Product, bf16_product, left_bytes
from kernels.ops.cpu.tile import MOST_INT8, Tile, for_each_height
from kernels.ops.cpu.vectors import FLOATS, number


@intrinsic
def left_size(typing_context: Any) -> Any:
    """Bytes of one number of the left-hand matrix as the bfloat16 tiles read it; a constant in the compiled kernel."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return number(left_bytes())

    return types.int64(), generate


def _bf16_tile(vectors: int, fetching: bool) -> Any:
    @intrinsic
    def tile(
        typing_context: Any,
        rows: Any,
        a: Any,
        lda: Any,
        b: Any,
        ldb: Any,
        steps: Any,
        c: Any,
        ldc: Any,
        add: Any,
        ahead: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows, a, lda, b, ldb, steps, c, ldc, add, ahead = arguments

            def emit(height: int) -> None:
                tile = Tile(builder, height, vectors, bf16_product())
                tile.store(
                    c,
                    ldc,
                    tile.loop(
                        a, lda, b, ldb, steps, tile.load_or_zero(c, ldc, add), ahead if fetching else None
                    ),
                )

            for_each_height(builder, rows, emit)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return tile


bf16_tile_32 = _bf16_tile(2, fetching=False)
fetching_tile_16, fetching_tile_32 = _bf16_tile(1, fetching=True), _bf16_tile(2, fetching=True)
"""c[rows, 32] (+)= a[rows, 2 * steps] · b: arguments (rows, a, lda, b, ldb, steps, c, ldc, add), strides in bytes.

a is bfloat16, 4-byte aligned, or float32 where the product is FMA (see left_size); b bfloat16 pairs and c float32,
64-byte aligned; steps > 0; rows is one of HEIGHTS; `add` is 0 or 1. fetching_tile_* prefetch `ahead` bytes ahead of b.
"""


@intrinsic
def int8_tile_32(
    typing_context: Any,
    rows: Any,
    a: Any,
    lda: Any,
    b: Any,
    steps: Any,
    groups: Any,
    offsets: Any,
    scales: Any,
    gain: Any,
    c: Any,
    ldc: Any,
    ahead: Any,
) -> Any:
    """c[rows, 32] = gain[32] · Σ over groups of scales[row, group] · (a[rows, group] · b[group] + offsets[group, 32]).

    a is uint8 [rows, groups, 4 * steps], b int8 in fours, offsets int32, scales [rows, groups], gain and c float32;
    rows is one of HEIGHTS up to MOST_INT8. Nothing happens on a processor without VNNI.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, a, lda, b, steps, groups, offsets, scales, gain, c, ldc, ahead = arguments

        def emit(height: int) -> None:
            tile = Tile(builder, height, 2, Product.INT8)
            total = tile.group_loop(a, lda, b, steps, groups, offsets, scales, ahead)
            gains = tile.vectors_at(gain, FLOATS)
            tile.store(c, ldc, {cell: builder.fmul(total[cell], gains[cell[1]]) for cell in tile.cells()})

        # The calling kernel serves both kinds of weights and must also compile where int8 is not supported.
        if "avx512vnni" in processor_features():
            for_each_height(builder, rows, emit, MOST_INT8)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12), generate
