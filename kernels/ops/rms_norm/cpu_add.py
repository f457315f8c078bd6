"""What a part of a layer gave, normed and added to the residual stream, and the norm that follows, in one pass."""

import numpy as np

from kernels.ops.cpu.intrinsics import f32, float_of, i64
from kernels.ops.cpu.jit import Float, device, unit
from kernels.ops.cpu.tasks import done, draw, wait
from kernels.ops.rms_norm.cpu import inverse_rms, norm_row

_ROWS_PER_TILE = 4


@device
def _copy(x: int, size: int, out: int) -> None:
    value, target = f32(x), f32(out)
    for i in range(size):
        target[i] = value[i]


@device
def _add_normed(x: int, size: int, branch: int, weight: int, eps: Float) -> None:
    """x[size] += norm(branch[size]), all float32."""
    value, added, gain = f32(x), f32(branch), f32(weight)
    factor = inverse_rms(branch, size, eps)
    for i in range(size):
        value[i] += added[i] * factor * gain[i]


@unit
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

    With an index, in which a row may come twice, both are read at its rows and x stays as it was. `scratch` has room
    for two rows.
    """
    eps = float_of(np.uint32(eps_bits))
    num_tiles = (rows + _ROWS_PER_TILE - 1) // _ROWS_PER_TILE
    number = draw(phase)
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
        number = draw(phase)
    wait(phase, num_tiles)
