"""Matrix products over packed weights, tile by tile; the epilogue runs while the tile is in cache."""

import numpy as np

from kernels.ops.cpu.bf16 import from_bf16
from kernels.ops.cpu.intrinsics import f32, i64, u16
from kernels.ops.cpu.jit import compiled_function, jit_inline
from kernels.ops.cpu.product import Product, bf16_product
from kernels.ops.cpu.tasks import done, next_tile, wait
from kernels.ops.cpu.tile import HEIGHTS, MOST_INT8, next_height
from kernels.ops.cpu.tiles import fetching_tile_32, int8_tile_32, left_size
from kernels.ops.linear.cpu_finish import add_32, gelu_mul_16, silu_mul_16, store_32
from kernels.ops.linear.packing import PackedLinear

_PANELS, _BIAS, _SCALES, _OFFSETS, NUM_INPUTS, _NUM_OUTPUTS, _NUM_PANELS, NUM_GROUPS = range(8)
LINEAR_BYTES = 64
"""A PackedLinear as the kernels read it: eight int64. The first four are addresses, 0 if absent."""

STORE, ADD, SILU_MUL, GELU_MUL = 0, 1, 2, 3
"""out = y; out += y; out = bfloat16(silu(gate) · up) of interleaved columns; the same with gelu in its tanh form."""

_PASS_BYTES = 1 << 19
"""Left-hand rows that are multiplied by all panels before the next rows, so that they stay in a core's cache."""
_MAX_ROWS_PER_TILE = 96
_MANY_TILES = 64
"""With this many tiles, each takes two panels: rows are read once for both, and silu fills whole cache lines."""
_AHEAD = 4096
"""Prefetch distance in bytes ahead of the weights that are read; panels are contiguous in memory."""
_TILE_ROW_BYTES = 128
_TILE_BYTES = HEIGHTS[-1] * _TILE_ROW_BYTES


def scratch_bytes(num_inputs: int) -> int:
    """Return the scratch bytes per thread: a tile's results and, where the tile reads float32, its widened rows."""
    return _TILE_BYTES + (HEIGHTS[-1] * num_inputs * 4 if bf16_product() is Product.FMA else 0)


def describe(linear: PackedLinear) -> tuple[int, ...]:
    """Return the record of `linear`, which must outlive the record's use."""
    tensors = (linear.panels, linear.bias, linear.scales, linear.offsets)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    return (*addresses, linear.num_inputs, linear.num_outputs, linear.panels.shape[0], linear.num_groups)


@jit_inline
def _product(linear: int, panel: int, rows: int, a: int, lda: int, a_scales: int, tile: int) -> None:
    """tile[rows, 32] float32 = one panel's outputs, scales and bias applied."""
    field = i64(linear)
    k, panels = field[NUM_INPUTS], field[_PANELS]
    if field[_SCALES] == 0:
        fetching_tile_32(rows, a, lda, panels + panel * k * 64, 128, k // 2, tile, 128, 0, _AHEAD)
    else:
        groups = field[NUM_GROUPS]
        int8_tile_32(
            rows,
            a,
            lda,
            panels + panel * k * 32,
            k // groups // 4,
            groups,
            field[_OFFSETS] + panel * groups * 128,
            a_scales,
            field[_SCALES] + panel * 128,
            tile,
            128,
            _AHEAD,
        )
    if field[_BIAS] != 0:
        bias = f32(field[_BIAS] + panel * 128)
        for row in range(rows):
            y = f32(tile + row * _TILE_ROW_BYTES)
            for column in range(32):
                y[column] += bias[column]


@jit_inline
def _widen(rows: int, a: int, lda: int, k: int, wide: int) -> None:
    """float32 wide[rows, k] from bfloat16 rows."""
    for row in range(rows):
        half, value = u16(a + row * lda), f32(wide + row * k * 4)
        for i in range(k):
            value[i] = from_bf16(half[i])


@jit_inline
def _finish(mode: int, tile: int, rows: int, panel: int, num_outputs: int, out: int, ldo: int) -> None:
    if mode in (SILU_MUL, GELU_MUL):
        width = min(16, num_outputs // 2 - panel * 16)
        for row in range(rows):
            gate, target = tile + row * _TILE_ROW_BYTES, out + row * ldo + panel * 32
            # The last panel may have fewer columns: its results go through the tile.
            result_at = target if width == 16 else gate
            if mode == SILU_MUL:
                silu_mul_16(gate, gate + 64, result_at)
            else:
                gelu_mul_16(gate, gate + 64, result_at)
            if width < 16:
                half, result = u16(target), u16(gate)
                for column in range(width):
                    half[column] = result[column]
        return
    width = min(32, num_outputs - panel * 32)
    for row in range(rows):
        at, goal = tile + row * _TILE_ROW_BYTES, out + row * ldo + panel * 128
        if width < 32:
            y, target = f32(at), f32(goal)
            for column in range(width):
                target[column] = y[column] + (target[column] if mode == ADD else np.float32(0))
        elif mode == ADD:
            add_32(at, goal)
        else:
            store_32(at, goal)


@compiled_function
def linear_phase(
    linear: int,
    mode: int,
    rows: int,
    a: int,
    lda: int,
    a_scales: int,
    out: int,
    ldo: int,
    scratch: int,
    phase: int,
) -> None:
    """One shared phase: out[rows, …] from a[rows, num_inputs] (bfloat16, or uint8 with its scales)."""
    field = i64(linear)
    k, num_outputs = field[NUM_INPUTS], field[_NUM_OUTPUTS]
    num_panels = field[_NUM_PANELS]
    passes = max(1, (rows * lda + _PASS_BYTES - 1) // _PASS_BYTES)
    rows_per_pass = ((rows + passes - 1) // passes + HEIGHTS[-1] - 1) // HEIGHTS[-1] * HEIGHTS[-1]
    rows_per_pass = max(HEIGHTS[-1], rows_per_pass)
    passes = (rows + rows_per_pass - 1) // rows_per_pass
    chunks = (rows_per_pass + _MAX_ROWS_PER_TILE - 1) // _MAX_ROWS_PER_TILE
    together = rows >= _MAX_ROWS_PER_TILE // 2 and passes * num_panels * chunks >= _MANY_TILES
    width = 2 if together else 1
    groups = (num_panels + width - 1) // width
    num_tiles = passes * groups * chunks
    scale_stride = field[NUM_GROUPS] * 4
    most = HEIGHTS[-1] if field[_SCALES] == 0 else MOST_INT8
    number = next_tile(phase)
    while number < num_tiles:
        chunk = number % chunks
        first_panel = number // chunks % groups * width
        last_panel = min(first_panel + width, num_panels)
        last = min(rows, (number // chunks // groups + 1) * rows_per_pass)
        row = number // chunks // groups * rows_per_pass + chunk * _MAX_ROWS_PER_TILE
        end = min(row + _MAX_ROWS_PER_TILE, last)
        while row < end:
            height = next_height(end - row, most)
            left, stride = a + row * lda, lda
            if field[_SCALES] == 0 and left_size() == 4:
                # Rows are widened once for the panels of this tile and again for the next ones. That takes a twentieth
                # of the product's time; rows kept in float32 would double what is read for every panel.
                left, stride = scratch + _TILE_BYTES, k * 4
                _widen(height, a + row * lda, lda, k, left)
            for panel in range(first_panel, last_panel):
                _product(linear, panel, height, left, stride, a_scales + row * scale_stride, scratch)
                _finish(mode, scratch, height, panel, num_outputs, out + row * ldo, ldo)
            row += height
        done(phase, num_tiles)
        number = next_tile(phase)
    wait(phase, num_tiles)
