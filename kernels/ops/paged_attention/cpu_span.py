"""One span of keys: scores, softmax and values, segment by segment and strip by strip of query rows."""

import math

import numpy as np

from kernels.ops.cpu.intrinsics import f32, float_of, i32, u16
from kernels.ops.cpu.jit import Float, jit_inline
from kernels.ops.cpu.tile import HEIGHTS, next_height
from kernels.ops.cpu.tiles import fetching_tile_16, fetching_tile_32, left_size
from kernels.ops.paged_attention.cpu_softmax import row_peak, update_peaks, weigh_row
from kernels.ops.paged_attention.cpu_value_tile import value_tile_16, value_tile_32

SEGMENT = 128
"""Keys between two updates of the running maximum; also the largest block size."""
STRIP = HEIGHTS[-1]
STRIP_BYTES = STRIP * SEGMENT * 8 + 64
"""Scores, weights (of up to four bytes) and peaks of a strip of query rows."""
_PEAKS = STRIP * SEGMENT * 8
_LOG2_E = np.float32(math.log2(math.e))


@jit_inline
def part_bytes(rows: int, head_dim: int) -> int:
    """Bytes of one span's unfinished output: float32 outputs, 16 partial sums, peak and factor of each row."""
    return rows * (head_dim * 4 + 64) + (2 * (rows + 16) * 4 + 63) // 64 * 64


@jit_inline
def part_fields(part: int, rows: int, head_dim: int) -> tuple[int, int, int]:
    """Return where the sums, peaks and factors of a part begin; 16 rows at a time are read and written."""
    sums = part + rows * head_dim * 4
    return sums, sums + rows * 64, sums + rows * 64 + (rows + 16) * 4


@jit_inline
def _times_keys(
    rows: int,
    queries: int,
    head_dim: int,
    keys: int,
    values: int,
    block_stride: int,
    block_size: int,
    table: int,
    count: int,
    scores: int,
) -> None:
    """scores[rows, count] = queries · keys, up to the end of the last block; prefetches the values."""
    block_ids = i32(table)
    block = keys + np.int64(block_ids[0]) * block_stride
    for offset in range(0, count, block_size):
        upcoming = values + np.int64(block_ids[0]) * block_stride
        if offset + block_size < count:
            upcoming = keys + np.int64(block_ids[offset // block_size + 1]) * block_stride
        for column in range(0, block_size - 16, 32):
            fetching_tile_32(
                rows,
                queries,
                head_dim * left_size(),
                block + column * 4,
                block_size * 4,
                head_dim // 2,
                scores + (offset + column) * 4,
                SEGMENT * 4,
                0,
                upcoming - block,
            )
        if block_size % 32 != 0:
            fetching_tile_16(
                rows,
                queries,
                head_dim * left_size(),
                block + block_size * 4 - 64,
                block_size * 4,
                head_dim // 2,
                scores + (offset + block_size) * 4 - 64,
                SEGMENT * 4,
                0,
                upcoming - block,
            )
        block = upcoming


@jit_inline
def _times_values(
    rows: int,
    weights: int,
    table: int,
    values: int,
    block_stride: int,
    block_size: int,
    head_dim: int,
    steps: int,
    following: int,
    output: int,
    states: int,
) -> None:
    """output[rows, head_dim] = output * factor + weights · values."""
    for column in range(0, head_dim - 16, 32):
        value_tile_32(
            rows,
            weights,
            SEGMENT * left_size(),
            table,
            values + column * 4,
            block_stride,
            head_dim * 4,
            block_size // 2,
            steps,
            following + column * 4,
            output + column * 4,
            head_dim * 4,
            states,
        )
    if head_dim % 32 != 0:
        column = head_dim - 16
        value_tile_16(
            rows,
            weights,
            SEGMENT * left_size(),
            table,
            values + column * 4,
            block_stride,
            head_dim * 4,
            block_size // 2,
            steps,
            following + column * 4,
            output + column * 4,
            head_dim * 4,
            states,
        )


@jit_inline
def _first_key(at: int, start: int, window: int) -> int:
    """First of the keys from `start` on that a query at position `at` sees."""
    return 0 if window == 0 else max(0, at - window + 1 - start)


@jit_inline
def _find_peak(scores: int, low: int, high: int, count: int) -> Float:
    """Largest of scores[low:high]; the others of `count` become minus infinity."""
    score = f32(scores)
    for i in range(low):
        score[i] = -np.inf
    for i in range(high, count):
        score[i] = -np.inf
    return row_peak(scores, count)


@jit_inline
def _softmax(
    rows: int,
    first_row: int,
    group: int,
    position: int,
    window: int,
    start: int,
    count: int,
    scores: int,
    scale_bits: int,
    sums: int,
    peaks: int,
    factors: int,
) -> None:
    """Weights of a strip's rows over the keys [start, start + count); what a row may not see gets 0."""
    scale = float_of(np.uint32(scale_bits)) * _LOG2_E
    weights = scores + STRIP * SEGMENT * 4
    found, peak, factor = f32(scores + _PEAKS), f32(peaks), f32(factors)
    for row in range(16):
        found[row] = -np.inf
    for row in range(rows):
        at = position + (first_row + row) // group
        low, high = min(count, _first_key(at, start, window)), max(0, min(count, at + 1 - start))
        found[row] = _find_peak(scores + row * SEGMENT * 4, low, high, count)
    update_peaks(scores + _PEAKS, scale, peaks, factors)
    for row in range(rows):
        at = position + (first_row + row) // group
        if at < start or _first_key(at, start, window) >= count:
            # The row sees none of these keys: without a peak the factor would be NaN.
            blank = u16(weights + row * SEGMENT * left_size())
            for i in range(count * left_size() // 2):
                blank[i] = np.uint16(0)
            factor[row] = np.float32(1)
        else:
            weigh_row(
                scores + row * SEGMENT * 4,
                count,
                scale,
                peak[row],
                factor[row],
                weights + row * SEGMENT * left_size(),
                sums + row * 64,
            )


@jit_inline
def attend_span(
    rows: int,
    group: int,
    head_dim: int,
    position: int,
    first: int,
    last: int,
    window: int,
    keys: int,
    values: int,
    block_stride: int,
    block_size: int,
    table: int,
    scale_bits: int,
    following: int,
    packed: int,
    scores: int,
    part: int,
) -> None:
    """Attend the queries in `packed` to the keys [first, last), unfinished, into `part`. Prefetches `following`."""
    sums, peaks, factors = part_fields(part, rows, head_dim)
    output, peak = f32(part), f32(peaks)
    for i in range(rows * head_dim + rows * 16):
        output[i] = np.float32(0)
    for row in range(rows + 16):
        peak[row] = -np.inf
    step = SEGMENT // block_size * block_size
    for start in range(first, last, step):
        entries = table + start // block_size * 4
        upcoming = np.int64(following)
        if start + step < last:
            upcoming = keys + np.int64(i32(entries)[step // block_size]) * block_stride
        row = 0
        while row < rows:
            height = next_height(rows - row, STRIP)
            # A strip's last query sees no further than itself.
            count = min(step, last - start, position + (row + height - 1) // group + 1 - start)
            if count > 0:
                queries, output = packed + row * head_dim * left_size(), part + row * head_dim * 4
                _times_keys(
                    height, queries, head_dim, keys, values, block_stride, block_size, entries, count, scores
                )
                _softmax(
                    height,
                    row,
                    group,
                    position,
                    window,
                    start,
                    (count + 15) // 16 * 16,
                    scores,
                    scale_bits,
                    sums + row * 64,
                    peaks + row * 4,
                    factors + row * 4,
                )
                _times_values(
                    height,
                    scores + STRIP * SEGMENT * 4,
                    entries,
                    values,
                    block_stride,
                    block_size,
                    head_dim,
                    (count + 1) // 2,
                    upcoming,
                    output,
                    factors + row * 4,
                )
            row += height
