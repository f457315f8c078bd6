"""Attention of a few queries over one row's blocks: each block is, as it lies, a right-hand matrix of the tile.

Online softmax over segments of keys (Milakov and Gimelshein 2018; Dao et al. 2022), all heads of a KV head together.
"""

import math

import numpy as np

from kernels.ops.cpu.intrinsics import f32, float_of, i32, row_max, u16
from kernels.ops.cpu.jit import Float, device, unit
from kernels.ops.cpu.tile import HEIGHTS, fetching_tile_16, fetching_tile_32, next_height
from kernels.ops.cpu.vector_math import exp2, to_bf16

SEGMENT = 128
"""Keys between two updates of the running maximum; also the largest block size."""
MAX_QUERIES = 48
"""Query rows (tokens × heads of a group) per call, if the group itself is not larger."""
_LOG2_E = np.float32(math.log2(math.e))


def scratch_bytes(group: int, head_dim: int) -> int:
    """Per thread: queries, scores, weights, output, maxima and sums."""
    rows = (max(MAX_QUERIES, group) + 1) // 2 * 2
    return rows * (head_dim * 2 + SEGMENT * 4 + SEGMENT * 2 + head_dim * 4) + 2 * (rows * 4 + 64) + 256


@device
def _times(
    rows: int,
    a: int,
    lda: int,
    b: int,
    ldb: int,
    columns: int,
    steps: int,
    c: int,
    ldc: int,
    add: int,
    ahead: int,
) -> None:
    """c[rows, columns] (+)= a · b for columns in multiples of 16."""
    row = 0
    while row < rows:
        height = next_height(rows - row, HEIGHTS[-1])
        for column in range(0, columns - 16, 32):
            fetching_tile_32(
                height,
                a + row * lda,
                lda,
                b + column * 4,
                ldb,
                steps,
                c + row * ldc + column * 4,
                ldc,
                add,
                ahead,
            )
        if columns % 32 != 0:
            column = columns - 16
            fetching_tile_16(
                height,
                a + row * lda,
                lda,
                b + column * 4,
                ldb,
                steps,
                c + row * ldc + column * 4,
                ldc,
                add,
                ahead,
            )
        row += height


@device
def _softmax_row(
    scores: int,
    weights: int,
    output: int,
    head_dim: int,
    low: int,
    high: int,
    count: int,
    scale: Float,
    peak: Float,
) -> tuple[Float, Float, Float]:
    """Turn scores [low, high) of `count` into bfloat16 weights, 0 elsewhere; rescale the output so far.

    Gives the new peak, the sum of the weights and the factor applied to what came before.
    """
    score, weight, out = f32(scores), u16(weights), f32(output)
    for i in range(low):
        score[i] = -np.inf
    rounded = (high + 15) // 16 * 16
    for i in range(high, rounded):
        score[i] = -np.inf
    top = max(peak, row_max(scores, rounded) * scale)
    total = np.float32(0)
    for i in range(rounded):
        p = exp2(score[i] * scale - top)
        total += p
        weight[i] = to_bf16(p)
    for i in range(rounded, count):
        weight[i] = np.uint16(0)
    factor = exp2(peak - top)
    for i in range(head_dim):
        out[i] *= factor
    return top, total, factor


@device
def _attend_head(
    rows: int,
    group: int,
    head_dim: int,
    position: int,
    last: int,
    window: int,
    keys: int,
    values: int,
    block_stride: int,
    block_size: int,
    table: int,
    scale: Float,
    following: int,
    scratch: int,
) -> None:
    """Queries in scratch to unscaled output and sums in scratch; `following` will be read next."""
    room = (max(MAX_QUERIES, group) + 1) // 2 * 2
    packed = scratch
    scores = packed + room * head_dim * 2
    weights = scores + room * SEGMENT * 4
    output = weights + room * SEGMENT * 2
    peaks, sums = f32(output + room * head_dim * 4), f32(output + room * head_dim * 4 + room * 4)
    for row in range(rows):
        peaks[row] = -np.inf
        sums[row] = np.float32(0)
    accumulated = f32(output)
    for i in range(rows * head_dim):
        accumulated[i] = np.float32(0)
    block_ids = i32(table)
    first = 0 if window == 0 else max(0, position - window + 1) // block_size * block_size
    step = SEGMENT // block_size * block_size
    for start in range(first, last, step):
        count = (min(step, last - start) + block_size - 1) // block_size * block_size
        index = start // block_size
        block = keys + np.int64(block_ids[index]) * block_stride
        after = values + np.int64(block_ids[index]) * block_stride
        for offset in range(0, count, block_size):
            index += 1
            upcoming = after
            if offset + block_size < count:
                upcoming = keys + np.int64(block_ids[index]) * block_stride
            target = scores + offset * 4
            ahead = upcoming - block
            _times(
                rows,
                packed,
                head_dim * 2,
                block,
                block_size * 4,
                block_size,
                head_dim // 2,
                target,
                SEGMENT * 4,
                0,
                ahead,
            )
            block = upcoming
        for row in range(rows):
            at = position + row // group
            high = min(at + 1 - start, count)
            low = 0 if window == 0 else max(0, at - window + 1 - start)
            if high <= low:
                blank = u16(weights + row * SEGMENT * 2)
                for i in range(count):
                    blank[i] = np.uint16(0)
                continue
            peak, total, factor = _softmax_row(
                scores + row * SEGMENT * 4,
                weights + row * SEGMENT * 2,
                output + row * head_dim * 4,
                head_dim,
                low,
                high,
                count,
                scale,
                peaks[row],
            )
            peaks[row] = peak
            sums[row] = sums[row] * factor + total
        index = start // block_size
        for offset in range(0, count, block_size):
            index += 1
            if offset + block_size < count:
                upcoming = values + np.int64(block_ids[index]) * block_stride
            elif start + step < last:
                upcoming = keys + np.int64(block_ids[index]) * block_stride
            else:
                upcoming = np.int64(following)
            steps = (min(block_size, last - start - offset) + 1) // 2
            source, ahead = weights + offset * 2, upcoming - block
            _times(
                rows,
                source,
                SEGMENT * 2,
                block,
                head_dim * 4,
                head_dim,
                steps,
                output,
                head_dim * 4,
                1,
                ahead,
            )
            block = upcoming


@unit
def attend(
    query: int,
    query_stride: int,
    num_tokens: int,
    num_heads: int,
    group: int,
    head_dim: int,
    position: int,
    window: int,
    keys: int,
    values: int,
    block_stride: int,
    block_size: int,
    table: int,
    scale_bits: int,
    out: int,
    scratch: int,
) -> None:
    """out = attention of `num_tokens` tokens, the first at `position`, over `num_heads` KV heads of one row.

    keys and values are the first of these heads in block 0; query and out, bfloat16 [num_tokens, num_heads * group,
    head_dim], step by query_stride bytes per token. window 0 means all keys.
    """
    rows = num_tokens * group
    room = (max(MAX_QUERIES, group) + 1) // 2 * 2
    output = scratch + room * (head_dim * 2 + SEGMENT * 6)
    accumulated, sums = f32(output), f32(output + room * head_dim * 4 + room * 4)
    scale = float_of(np.uint32(scale_bits)) * _LOG2_E
    head_bytes = head_dim * block_size * 2
    first_block = np.int64(i32(table)[0]) * block_stride
    for head in range(num_heads):
        columns = head * group * head_dim * 2
        for token in range(num_tokens):
            source = u16(query + token * query_stride + columns)
            packed = u16(scratch + token * group * head_dim * 2)
            for i in range(group * head_dim):
                packed[i] = source[i]
        _attend_head(
            rows,
            group,
            head_dim,
            position,
            position + num_tokens,
            window,
            keys + head * head_bytes,
            values + head * head_bytes,
            block_stride,
            block_size,
            table,
            scale,
            keys + (head + 1) * head_bytes + first_block,
            scratch,
        )
        for token in range(num_tokens):
            target = u16(out + token * query_stride + columns)
            for query_head in range(group):
                row = token * group + query_head
                inverse = np.float32(1) / sums[row]
                for i in range(head_dim):
                    target[query_head * head_dim + i] = to_bf16(accumulated[row * head_dim + i] * inverse)
