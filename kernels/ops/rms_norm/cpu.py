"""RMS norm of float32 rows to the left-hand matrix of the next product: bfloat16, or uint8 with scales.

Where a model norms a branch's output before it is added, the same pass does both.
"""

import numpy as np

from kernels.ops.cpu.bf16 import from_bf16, to_bf16
from kernels.ops.cpu.intrinsics import bits_of, f32, float_of, i64, u8, u16
from kernels.ops.cpu.jit import Float, compiled_function, jit_inline
from kernels.ops.cpu.tasks import done, next_tile, wait
from kernels.ops.cpu.vectors import LANES
from kernels.ops.rms_norm.cpu_vectors import encode_row, peak_bits, scale_row, scale_row_to_bf16, widen_row

_ROWS_PER_TILE = 4
_LEVELS = np.float32(127.0)

# The three phases repeat the loop over tiles. A shared loop would call each row's work by address or test in every row
# which phase it is; what they share is inlined per row: norm_row and quantize_group.


@jit_inline
def inverse_rms(x: int, size: int, eps: Float) -> Float:
    """1 / √(mean square + eps) of float32 x[size]."""
    value = f32(x)
    total = np.float32(0)
    for i in range(size):
        total += value[i] * value[i]
    return np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(eps))


@jit_inline
def quantize_group(x: int, size: int, out: int) -> Float:
    """uint8 out = round(x / scale) + 128 for float32 x[size]. Returns the scale, NaN if a value is not finite."""
    value, code = f32(x), u8(out)
    vectors = size // LANES * LANES
    # The bits of |x|, as integers, order like |x| with NaN above infinity: one maximum finds scale and bad values.
    largest = peak_bits(x, vectors) if vectors > 0 else np.uint32(0)
    for i in range(vectors, size):
        largest = max(largest, bits_of(value[i]) & np.uint32(0x7FFFFFFF))
    scale = float_of(largest) / _LEVELS
    inverse = np.float32(1) / max(scale, np.float32(1e-30))
    if vectors > 0:
        encode_row(x, vectors, inverse, out)
    for i in range(vectors, size):
        code[i] = np.uint8(np.int32(value[i] * inverse + np.float32(128.5)))
    return scale if largest < np.uint32(0x7F800000) else np.float32(np.nan)


@jit_inline
def norm_row(
    x: int, size: int, weight: int, eps: Float, groups: int, out: int, scales: int, wide: int
) -> None:
    """Norm one row to bfloat16 `out`, or through float32 wide[size] to codes and scales of its groups."""
    value, gain = f32(x), f32(weight)
    factor = inverse_rms(x, size, eps)
    vectors = size // LANES * LANES
    if groups == 0:
        half = u16(out)
        if vectors > 0:
            scale_row_to_bf16(x, weight, vectors, factor, out)
        for i in range(vectors, size):
            half[i] = to_bf16(value[i] * factor * gain[i])
        return
    normed, scale = f32(wide), f32(scales)
    if vectors > 0:
        scale_row(x, weight, vectors, factor, wide)
    for i in range(vectors, size):
        normed[i] = value[i] * factor * gain[i]
    run = size // groups
    for group in range(groups):
        scale[group] = quantize_group(wide + group * run * 4, run, out + group * run)


@compiled_function
def rms_norm_phase(
    rows: int,
    index: int,
    x: int,
    size: int,
    weight: int,
    eps_bits: int,
    groups: int,
    out: int,
    ldo: int,
    scales: int,
    scratch: int,
    phase: int,
) -> None:
    """One shared phase: out[rows] = norm(x[index[rows]]); index 0 means all rows in order, groups 0 bfloat16."""
    eps = float_of(np.uint32(eps_bits))
    num_tiles = (rows + _ROWS_PER_TILE - 1) // _ROWS_PER_TILE
    number = next_tile(phase)
    while number < num_tiles:
        for row in range(number * _ROWS_PER_TILE, min((number + 1) * _ROWS_PER_TILE, rows)):
            source = row if index == 0 else i64(index)[row]
            norm_row(
                x + source * size * 4,
                size,
                weight,
                eps,
                groups,
                out + row * ldo,
                scales + row * groups * 4,
                scratch,
            )
        done(phase, num_tiles)
        number = next_tile(phase)
    wait(phase, num_tiles)


@compiled_function
def quantize_phase(
    rows: int, x: int, size: int, groups: int, out: int, ldo: int, scales: int, scratch: int, phase: int
) -> None:
    """One shared phase: bfloat16 x[rows, size] to uint8 with a scale per row and group."""
    num_tiles = (rows + _ROWS_PER_TILE - 1) // _ROWS_PER_TILE
    run = size // groups
    number = next_tile(phase)
    while number < num_tiles:
        for row in range(number * _ROWS_PER_TILE, min((number + 1) * _ROWS_PER_TILE, rows)):
            half, wide, vectors = u16(x + row * size * 2), f32(scratch), size // LANES * LANES
            if vectors > 0:
                widen_row(x + row * size * 2, vectors, scratch)
            for i in range(vectors, size):
                wide[i] = from_bf16(half[i])
            scale = f32(scales + row * groups * 4)
            for group in range(groups):
                scale[group] = quantize_group(scratch + group * run * 4, run, out + row * ldo + group * run)
        done(phase, num_tiles)
        number = next_tile(phase)
    wait(phase, num_tiles)


@jit_inline
def _copy(x: int, size: int, out: int) -> None:
    value, target = f32(x), f32(out)
    for i in range(size):
        target[i] = value[i]


@jit_inline
def _add_normed(x: int, size: int, branch: int, weight: int, eps: Float) -> None:
    """x[size] += norm(branch[size]), all float32."""
    value, added, gain = f32(x), f32(branch), f32(weight)
    factor = inverse_rms(branch, size, eps)
    for i in range(size):
        value[i] += added[i] * factor * gain[i]


@compiled_function
def add_norm_phase(
    rows: int,
    index: int,
    x: int,
    size: int,
    branch: int,
    branch_weight: int,
    weight: int,
    eps_bits: int,
    groups: int,
    out: int,
    ldo: int,
    scales: int,
    scratch: int,
    phase: int,
) -> None:
    """One shared phase: x += norm(branch), then out = norm(x); the rest as in rms_norm_phase.

    With an index, in which a row may occur twice, both are read at its rows and x is unchanged. `scratch` has
    room for two rows.
    """
    eps = float_of(np.uint32(eps_bits))
    num_tiles = (rows + _ROWS_PER_TILE - 1) // _ROWS_PER_TILE
    number = next_tile(phase)
    while number < num_tiles:
        for row in range(number * _ROWS_PER_TILE, min((number + 1) * _ROWS_PER_TILE, rows)):
            source = row if index == 0 else i64(index)[row]
            target = x + source * size * 4
            if index != 0:
                _copy(target, size, scratch)
                target = scratch
            _add_normed(target, size, branch + source * size * 4, branch_weight, eps)
            norm_row(
                target,
                size,
                weight,
                eps,
                groups,
                out + row * ldo,
                scales + row * groups * 4,
                scratch + size * 4,
            )
        done(phase, num_tiles)
        number = next_tile(phase)
    wait(phase, num_tiles)
