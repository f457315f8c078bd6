"""The register tile under every matrix product: up to 12 rows times 16 or 32 columns.

The right-hand matrix lies in panels [k / pack, columns, pack], pack = 2 bfloat16 or 4 int8 per 32-bit lane, so one
AVX-512 dot-product instruction does 16 columns × pack multiplications. 12 × 2 accumulators fill the register file
and hide the instruction's latency; measured, the loop runs at the units' full rate. Where float32 multiplications are
quicker than dot products of bfloat16 (see Product), each lane of the same panels is split in registers.
"""

from typing import Any

from llvmlite import ir

from kernels.ops.cpu.intrinsics import F32, I32, I64
from kernels.ops.cpu.jit import jit_inline
from kernels.ops.cpu.product import Product
from kernels.ops.cpu.vectors import FLOATS, INTS, LANES, BFloat, fma, number, prefetch_line, spread

HEIGHTS = (1, 2, 3, 4, 6, 12)
PANEL = 32
"""Columns of a full tile."""
MOST_INT8 = 6
"""An int8 tile holds a second, float32 set of accumulators."""


@jit_inline
def next_height(rows: int, most: int) -> int:
    """How many of the remaining `rows` the next tile takes: one of HEIGHTS, at most `most`.

    Heights below 3 are avoided where possible: so few accumulators wait for each other.
    """
    if rows >= most:
        return most
    if rows in (6, 9, 10):
        return 6
    if rows == 5:
        return 3
    return min(rows, 4)


_PAIRS = ir.VectorType(BFloat(), 2 * LANES)


class Tile:
    """Emits one tile of fixed size into a function under construction."""

    def __init__(self, builder: Any, rows: int, vectors: int, product: Product) -> None:
        self.builder = builder
        self.rows, self.vectors = rows, vectors
        self.product = product
        self.accumulator = INTS if product is Product.INT8 else FLOATS

    def at(self, base: Any, row: int, stride: Any, vector: int, kind: Any) -> Any:
        offset = self.builder.add(self.builder.mul(stride, number(row)), number(64 * vector))
        return self.builder.inttoptr(self.builder.add(base, offset), kind.as_pointer())

    def broadcast(self, address: Any, kind: Any, vector: Any) -> Any:
        scalar = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)
        return spread(self.builder, scalar, vector)

    def vectors_at(self, address: Any, kind: Any) -> list[Any]:
        return [
            self.builder.load(self.at(address, 0, address, vector, kind), align=64)
            for vector in range(self.vectors)
        ]

    def cells(self) -> list[tuple[int, int]]:
        return [(row, vector) for row in range(self.rows) for vector in range(self.vectors)]

    def loop(
        self, a: Any, lda: Any, b: Any, ldb: Any, steps: Any, start: dict[Any, Any], ahead: Any = None
    ) -> dict[Any, Any]:
        """acc[row, vector] = start + Σ over steps; leaves the builder after the loop.

        ahead: distance from b to what is prefetched while b is read.
        """
        builder = self.builder
        before = builder.block
        body, after = builder.function.append_basic_block("k"), builder.function.append_basic_block("k_end")
        builder.branch(body)
        builder.position_at_end(body)
        step = builder.phi(I64)
        sums = {cell: builder.phi(self.accumulator) for cell in self.cells()}
        row_b = builder.add(b, builder.mul(step, ldb))
        weights = [
            builder.load(self.at(row_b, 0, ldb, vector, INTS), align=64) for vector in range(self.vectors)
        ]
        if ahead is not None:
            for vector in range(self.vectors):
                prefetch_line(builder, builder.add(builder.add(row_b, ahead), number(64 * vector)))
        result = self.add_products(self.column_of(a, step), lda, weights, sums)
        following = builder.add(step, number(1))
        builder.cbranch(builder.icmp_signed("<", following, steps), body, after)
        step.add_incoming(number(0), before)
        step.add_incoming(following, body)
        for cell in self.cells():
            sums[cell].add_incoming(start[cell], before)
            sums[cell].add_incoming(result[cell], body)
        builder.position_at_end(after)
        return result

    def column_of(self, a: Any, step: Any) -> Any:
        """The address that a step reads in the first row."""
        return self.builder.add(a, self.builder.shl(step, number(3 if self.product is Product.FMA else 2)))

    def add_products(self, a: Any, lda: Any, weights: list[Any], sums: dict[Any, Any]) -> dict[Any, Any]:
        """sums[row, vector] plus the products of one step: weights are INTS, the rows' columns begin at `a`."""
        return (self._add_widened if self.product is Product.FMA else self._add_dots)(a, lda, weights, sums)

    def _add_dots(self, a: Any, lda: Any, weights: list[Any], sums: dict[Any, Any]) -> dict[Any, Any]:
        """Add dot products of the lanes' pairs or fours."""
        builder, integer = self.builder, self.product is Product.INT8
        operand = INTS if integer else _PAIRS
        dot = builder.module.declare_intrinsic(
            "llvm.x86.avx512.vpdpbusd.512" if integer else "llvm.x86.avx512bf16.dpbf16ps.512",
            (),
            ir.FunctionType(self.accumulator, [self.accumulator, operand, operand]),
        )
        weights = [builder.bitcast(lanes, operand) for lanes in weights]
        result = {}
        for row in range(self.rows):
            address = builder.add(a, builder.mul(lda, number(row)))
            value = builder.bitcast(self.broadcast(address, I32, INTS), operand)
            for vector in range(self.vectors):
                result[row, vector] = builder.call(dot, [sums[row, vector], value, weights[vector]])
        return result

    def _add_widened(self, a: Any, lda: Any, weights: list[Any], sums: dict[Any, Any]) -> dict[Any, Any]:
        """Multiply pairs of bfloat16 by two float32 of each row: first the even inputs, then the odd ones."""
        builder = self.builder
        even = [builder.shl(lanes, ir.Constant(INTS, [16] * LANES)) for lanes in weights]
        odd = [builder.and_(lanes, ir.Constant(INTS, [0xFFFF0000] * LANES)) for lanes in weights]
        for offset, half in ((0, even), (4, odd)):
            right = [builder.bitcast(lanes, FLOATS) for lanes in half]
            following = {}
            for row in range(self.rows):
                address = builder.add(builder.add(a, builder.mul(lda, number(row))), number(offset))
                left = self.broadcast(address, F32, FLOATS)
                for vector in range(self.vectors):
                    following[row, vector] = fma(builder, left, right[vector], sums[row, vector])
            sums = following
        return sums

    def group_loop(
        self, a: Any, lda: Any, b: Any, steps: Any, groups: Any, offsets: Any, scales: Any, ahead: Any
    ) -> dict[Any, Any]:
        """Float sums over groups, each of which is an integer loop; leaves the builder after the loop."""
        builder = self.builder
        before = builder.block
        body, after = (
            builder.function.append_basic_block("group"),
            builder.function.append_basic_block("group_end"),
        )
        builder.branch(body)
        builder.position_at_end(body)
        group = builder.phi(I64)
        total = {cell: builder.phi(FLOATS) for cell in self.cells()}
        first_input = builder.mul(group, builder.shl(steps, number(2)))
        start = self.vectors_at(builder.add(offsets, builder.mul(group, number(128))), INTS)
        sums = self.loop(
            builder.add(a, first_input),
            lda,
            builder.add(b, builder.mul(first_input, number(32))),
            number(128),
            steps,
            {cell: start[cell[1]] for cell in self.cells()},
            ahead,
        )
        column = builder.add(scales, builder.shl(group, number(2)))
        result = {}
        for row in range(self.rows):
            stride = builder.shl(groups, number(2))
            factor = self.broadcast(builder.add(column, builder.mul(stride, number(row))), F32, FLOATS)
            for vector in range(self.vectors):
                value = builder.sitofp(sums[row, vector], FLOATS)
                result[row, vector] = fma(builder, value, factor, total[row, vector])
        following = builder.add(group, number(1))
        end = builder.block
        builder.cbranch(builder.icmp_signed("<", following, groups), body, after)
        group.add_incoming(number(0), before)
        group.add_incoming(following, end)
        for cell in self.cells():
            total[cell].add_incoming(ir.Constant(FLOATS, [0.0] * 16), before)
            total[cell].add_incoming(result[cell], end)
        builder.position_at_end(after)
        return result

    def load_or_zero(self, c: Any, ldc: Any, add: Any) -> dict[Any, Any]:
        """The initial float accumulators: C if `add` is not 0, else 0."""
        builder = self.builder
        before = builder.block
        load, after = (
            builder.function.append_basic_block("load"),
            builder.function.append_basic_block("loaded"),
        )
        builder.cbranch(builder.icmp_signed("!=", add, number(0)), load, after)
        builder.position_at_end(load)
        loaded = {
            cell: builder.load(self.at(c, cell[0], ldc, cell[1], FLOATS), align=64) for cell in self.cells()
        }
        builder.branch(after)
        builder.position_at_end(after)
        start = {}
        for cell in self.cells():
            start[cell] = builder.phi(FLOATS)
            start[cell].add_incoming(ir.Constant(FLOATS, [0.0] * 16), before)
            start[cell].add_incoming(loaded[cell], load)
        return start

    def store(self, c: Any, ldc: Any, values: dict[Any, Any]) -> None:
        for cell, value in values.items():
            self.builder.store(value, self.at(c, cell[0], ldc, cell[1], FLOATS), align=64)


def for_each_height(builder: Any, rows: Any, emit: Any, most: int = HEIGHTS[-1]) -> None:
    """Branch to `emit(height)` for the one of HEIGHTS that equals `rows`."""
    end = builder.function.append_basic_block("tile_end")
    switch = builder.switch(rows, end)
    for height in (height for height in HEIGHTS if height <= most):
        block = builder.function.append_basic_block(f"rows_{height}")
        switch.add_case(number(height), block)
        builder.position_at_end(block)
        emit(height)
        builder.branch(end)
    builder.position_at_end(end)
