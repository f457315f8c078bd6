"""Head norm, rotary and the write into the pool, in one pass over the fused q, k, v."""

import numpy as np

from kernels.ops.cpu.intrinsics import f32, float_of, i64
from kernels.ops.cpu.jit import Float, compiled_function, jit_inline
from kernels.ops.cpu.tasks import done, next_tile, wait
from kernels.ops.cpu.vectors import LANES
from kernels.ops.rms_norm.cpu import inverse_rms
from kernels.ops.rms_norm.cpu_vectors import scale_row
from kernels.ops.rotary.cpu_vectors import (
    ask_for_lines,
    narrow_head,
    rotate_halves,
    store_both,
    store_first,
    store_pairs,
    store_second,
)

_ROWS_PER_TILE, _ROWS_PER_LONG_TILE = 8, 32
_MANY_ROWS = 128
"""With this many rows most belong to prompts, where 16 neighbouring tokens share the cache lines of their keys. Threads
that alternated every few rows would pass these lines back and forth, which took longer than all the rest."""


@jit_inline
def _rotate(x: int, size: int, cos: int, sin: int, gain: int, eps: Float) -> None:
    """Rotate one float32 head in place; gain is the address of its norm weight, or 0."""
    half = size // 2
    if gain != 0:
        scale_row(x, gain, size, inverse_rms(x, size, eps), x)
    if half % LANES == 0:
        rotate_halves(x, half, cos, sin)
        return
    first, second, c, s = f32(x), f32(x + half * 4), f32(cos), f32(sin)
    for i in range(half):
        a, b = first[i], second[i]
        first[i] = a * c[i] - b * s[i]
        second[i] = b * c[i] + a * s[i]


@jit_inline
def _store_value(
    x: int, row_bytes: int, size: int, block: int, offset: int, before: bool, after: bool
) -> None:
    """Write one float32 head into a value block [block_size / 2, size, 2].

    before, after: whether the previous or next row, row_bytes away, is the previous or next token of the same request.
    The first token of a pair is written together with the second, so that no two threads write one pair. A first token
    without a second gets 0 beside it: a NaN that a freed block left there would spoil the sum even with weight 0.
    """
    pair = block + offset // 2 * size * 4
    if offset % 2 == 0:
        if after:
            store_both(x, x + row_bytes, size, pair)
        else:
            store_first(x, x, size, pair)
    elif not before:
        store_second(x, x, size, pair)


@compiled_function
def rotate_and_store_phase(
    rows: int,
    qkv: int,
    heads: int,
    kv_heads: int,
    size: int,
    cos: int,
    sin: int,
    positions: int,
    query_gain: int,
    key_gain: int,
    eps_bits: int,
    query: int,
    keys: int,
    values: int,
    block_stride: int,
    block_size: int,
    slots: int,
    phase: int,
) -> None:
    """One shared phase: float32 qkv [rows, heads + 2 * kv_heads, size] to bfloat16 queries and the layer's blocks."""
    eps = float_of(np.uint32(eps_bits))
    head_bytes = size * block_size * 2
    slot_of, position_of = i64(slots), i64(positions)
    rows_per_tile = _ROWS_PER_LONG_TILE if rows >= _MANY_ROWS else _ROWS_PER_TILE
    num_tiles = (rows + rows_per_tile - 1) // rows_per_tile
    number = next_tile(phase)
    while number < num_tiles:
        for row in range(number * rows_per_tile, min((number + 1) * rows_per_tile, rows)):
            angle = position_of[row] * (size // 2) * 4
            row_bytes = (heads + 2 * kv_heads) * size * 4
            head = qkv + row * row_bytes
            slot = slot_of[row]
            block, offset = slot // block_size * block_stride, slot % block_size
            if rows < _MANY_ROWS:
                # Each row has blocks of its own, whose cache lines are prefetched while the queries are rotated.
                for index in range(kv_heads):
                    at = block + index * head_bytes
                    ask_for_lines(keys + at + offset * 4, block_size * 4, size // 2)
                    ask_for_lines(values + at + offset // 2 * size * 4, 64, (size + 15) // 16)
            for index in range(heads):
                _rotate(head, size, cos + angle, sin + angle, query_gain, eps)
                narrow_head(head, size, query + (row * heads + index) * size * 2)
                head += size * 4
            before, after = (
                row > 0 and slot_of[row - 1] == slot - 1,
                row + 1 < rows and slot_of[row + 1] == slot + 1,
            )
            for index in range(kv_heads):
                _rotate(head, size, cos + angle, sin + angle, key_gain, eps)
                # Keys lie as [size / 2, block_size, 2].
                store_pairs(head, size, keys + block + index * head_bytes + offset * 4, block_size * 4)
                value = head + kv_heads * size * 4
                _store_value(
                    value, row_bytes, size, values + block + index * head_bytes, offset, before, after
                )
                head += size * 4
        done(phase, num_tiles)
        number = next_tile(phase)
    wait(phase, num_tiles)
