"""The product of attention weights with the values of several blocks, found through the block table."""

# ruff: noqa: ARG001 -- Numba fixes the arguments of an intrinsic and of its generator
from typing import Any

from kernels.ops.cpu.intrinsics import F32, I32, I64
from kernels.ops.cpu.jit import intrinsic, types
from kernels.ops.cpu.product import bf16_product, left_bytes
from kernels.ops.cpu.tile import Tile, for_each_height
from kernels.ops.cpu.vectors import FLOATS, counted_loop, load, number


class _Walk:
    """Emits the loop over a row's blocks around a tile's loop over the keys of each."""

    def __init__(self, builder: Any, tile: Tile, arguments: tuple[Any, ...]) -> None:
        self._builder, self._tile = builder, tile
        (
            _,
            self._weights,
            self._stride,
            self._table,
            self._values,
            self._block_stride,
            self._ldb,
            self._block_steps,
            self._steps,
            self._following,
            self._output,
            self._ldc,
            self._factors,
        ) = arguments

    def _block(self, index: Any) -> Any:
        entry = self._builder.add(self._table, self._builder.shl(index, number(2)))
        block = self._builder.sext(load(self._builder, entry, I32, align=4), I64)
        return self._builder.add(self._values, self._builder.mul(block, self._block_stride))

    def _rescaled(self) -> list[Any]:
        tile, builder = self._tile, self._builder
        factors = [
            tile.broadcast(builder.add(self._factors, number(4 * row)), F32, FLOATS)
            for row in range(tile.rows)
        ]
        return [
            builder.fmul(
                builder.load(tile.at(self._output, row, self._ldc, vector, FLOATS), align=64), factors[row]
            )
            for row, vector in tile.cells()
        ]

    def emit(self) -> None:
        tile, builder = self._tile, self._builder
        cells = tile.cells()

        def one_block(index: Any, sums: list[Any]) -> list[Any]:
            first = builder.mul(index, self._block_steps)
            block = self._block(index)
            later = builder.add(first, self._block_steps)
            is_last = builder.icmp_signed(">=", later, self._steps)
            # The table ends after the last block: the block's own entry is read instead.
            next_index = builder.select(is_last, index, builder.add(index, number(1)))
            ahead = builder.select(is_last, self._following, self._block(next_index))
            rest = builder.sub(self._steps, first)
            count = builder.select(is_last, rest, self._block_steps)
            a = builder.add(self._weights, builder.mul(first, number(2 * left_bytes())))
            result = tile.loop(
                a,
                self._stride,
                block,
                self._ldb,
                count,
                dict(zip(cells, sums, strict=True)),
                builder.sub(ahead, block),
            )
            return [result[cell] for cell in cells]

        full = builder.sub(builder.add(self._steps, self._block_steps), number(1))
        sums = counted_loop(builder, builder.udiv(full, self._block_steps), self._rescaled(), one_block)
        tile.store(self._output, self._ldc, dict(zip(cells, sums, strict=True)))


def _value_tile(vectors: int) -> Any:
    @intrinsic
    def tile(
        typing_context: Any,
        rows: Any,
        weights: Any,
        stride: Any,
        table: Any,
        values: Any,
        block_stride: Any,
        ldb: Any,
        block_steps: Any,
        steps: Any,
        following: Any,
        output: Any,
        ldc: Any,
        factors: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def emit(height: int) -> None:
                _Walk(builder, Tile(builder, height, vectors, bf16_product()), arguments).emit()

            for_each_height(builder, arguments[0], emit)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 13), generate

    return tile


value_tile_16, value_tile_32 = _value_tile(1), _value_tile(2)
"""output[rows, 16 or 32] = output * factors[rows] + weights · values.

weights: a left-hand matrix as the tile reads it, [rows, 2 * steps], `stride` bytes apart; values: address of these
columns in block 0, whose rows of two keys are `ldb` bytes apart, `block_steps` of them in a block; table: int32 block
ids, as many as the steps need; following: address to prefetch.
"""
