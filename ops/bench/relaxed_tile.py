"""The bfloat16 product without the fixed order of its sums: our own kernel if bits did not matter.

A tile of few rows has few accumulators, and each waits for itself. Here such tiles sum even and odd inputs apart, in
twice as many accumulators, and add the two at the end: quicker where the weights come from a cache, but a row is then
rounded differently in a tile of 4 than in one of 12, which has no free registers. Level 2 forbids that.
"""

# ruff: noqa: ARG001 -- Numba fixes the arguments of an intrinsic and of its generator
from typing import Any

import torch
from llvmlite import ir

from kernels.ops.cpu.intrinsics import I64
from kernels.ops.cpu.jit import compiled_function, intrinsic, types
from kernels.ops.cpu.product import Product, bf16_product
from kernels.ops.cpu.tile import HEIGHTS, Tile, next_height
from kernels.ops.cpu.tiles import bf16_tile_32
from kernels.ops.cpu.vectors import FLOATS, INTS, number
from kernels.ops.linear.packing import PackedLinear

MOST_APART = 6
"""Rows of the largest tile whose doubled accumulators still fit 32 registers."""


class _TwoChains(Tile):
    def apart(self, a: Any, lda: Any, b: Any, ldb: Any, steps: Any) -> dict[Any, Any]:
        """acc[row, vector] = Σ over an even number of steps."""
        builder = self.builder
        before = builder.block
        body, after = builder.function.append_basic_block("k2"), builder.function.append_basic_block("k2_end")
        builder.branch(body)
        builder.position_at_end(body)
        step = builder.phi(I64)
        chains = [{cell: builder.phi(self.accumulator) for cell in self.cells()} for _ in range(2)]
        results: list[dict[Any, Any]] = [{}, {}]
        for chain in range(2):
            at = builder.add(step, number(chain))
            row_b = builder.add(b, builder.mul(at, ldb))
            weights = [
                builder.load(self.at(row_b, 0, ldb, vector, INTS), align=64) for vector in range(self.vectors)
            ]
            results[chain] = self.add_products(self.column_of(a, at), lda, weights, chains[chain])
        following = builder.add(step, number(2))
        builder.cbranch(builder.icmp_signed("<", following, steps), body, after)
        step.add_incoming(number(0), before)
        step.add_incoming(following, body)
        for sums, result in zip(chains, results, strict=True):
            for cell in self.cells():
                sums[cell].add_incoming(ir.Constant(FLOATS, [0.0] * 16), before)
                sums[cell].add_incoming(result[cell], body)
        builder.position_at_end(after)
        return {cell: builder.fadd(results[0][cell], results[1][cell]) for cell in self.cells()}


@intrinsic
def _tile_of_two_chains(typing_context: Any, rows: Any, a: Any, lda: Any, b: Any, steps: Any, c: Any) -> Any:
    """c[rows, 32] = a · b for rows up to MOST_APART; strides of b and c are 128 bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, a, lda, b, steps, c = arguments
        end = builder.function.append_basic_block("apart_end")
        switch = builder.switch(rows, end)
        for height in (height for height in HEIGHTS if height <= MOST_APART):
            block = builder.function.append_basic_block(f"apart_{height}")
            switch.add_case(number(height), block)
            builder.position_at_end(block)
            tile = _TwoChains(builder, height, 2, bf16_product())
            tile.store(c, number(128), tile.apart(a, lda, b, number(128), steps))
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@compiled_function
def _product_phase(
    strict: int, panels: int, num_panels: int, k: int, rows: int, a: int, lda: int, out: int
) -> None:
    """out[num_panels, rows, 32] float32 = a[rows, k] · panels, each panel once over all rows."""
    for panel in range(num_panels):
        row = 0
        while row < rows:
            height = next_height(rows - row, HEIGHTS[-1])
            target = out + (panel * rows + row) * 128
            source = a + row * lda
            if strict != 0 or height > MOST_APART:
                bf16_tile_32(height, source, lda, panels + panel * k * 64, 128, k // 2, target, 128, 0, 0)
            else:
                _tile_of_two_chains(height, source, lda, panels + panel * k * 64, k // 2, target)
            row += height


def left_type() -> torch.dtype:
    """The type of the rows that the tile reads on this processor."""
    return torch.float32 if bf16_product() is Product.FMA else torch.bfloat16


def product(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, *, strict: bool) -> None:
    """x [rows, num_inputs] of `left_type` times a bfloat16 weight: out float32 [num_panels, rows, 32]; one thread."""
    _product_phase(
        int(strict),
        packed.panels.data_ptr(),
        packed.panels.shape[0],
        packed.num_inputs,
        x.shape[0],
        x.data_ptr(),
        x.stride(0) * x.itemsize,
        out.data_ptr(),
    )
