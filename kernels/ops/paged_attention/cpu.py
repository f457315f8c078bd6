"""Attention of a few queries over one row's blocks; each block is laid out as a right-hand matrix of the tile.

Online softmax over segments of keys (Milakov and Gimelshein 2018; Dao et al. 2022), all heads of a KV head together.
Spans of several segments are computed independently and merged in order, so that threads can share a row's spans and
the sums are rounded as on one thread.
"""

import numpy as np

from kernels.ops.cpu.bf16 import from_bf16
from kernels.ops.cpu.intrinsics import f32, i32, u16
from kernels.ops.cpu.jit import compiled_function, jit_inline
from kernels.ops.cpu.product import left_bytes
from kernels.ops.cpu.tiles import left_size
from kernels.ops.paged_attention.cpu_softmax import finish_row, merge_row
from kernels.ops.paged_attention.cpu_span import SEGMENT, STRIP_BYTES, attend_span, part_bytes, part_fields

MAX_QUERIES = 48
"""Query rows (tokens × heads of a group) per call, unless the group itself is larger."""
ALL_SPANS = -1
_SEGMENTS_PER_SPAN = 4


@jit_inline
def span_tokens(block_size: int) -> int:
    """Return the number of keys in a span, whose softmax is computed independently."""
    return SEGMENT // block_size * block_size * _SEGMENTS_PER_SPAN


def scratch_bytes(group: int, head_dim: int) -> int:
    """Return the scratch bytes per thread.

    Scratch holds queries, scores and weights of a strip, and the output of a span and of the spans before it.
    """
    rows = (max(MAX_QUERIES, group) + 1) // 2 * 2
    return rows * head_dim * left_bytes() + STRIP_BYTES + 2 * int(part_bytes.py_func(rows, head_dim)) + 64


@jit_inline
def _merge(rows: int, head_dim: int, output: int, part: int) -> None:
    """Merge the `part` of a later span into `output`."""
    sums, peaks, _ = part_fields(output, rows, head_dim)
    others, other_peaks, _ = part_fields(part, rows, head_dim)
    for row in range(rows):
        at = row * head_dim * 4
        merge_row(
            output + at,
            sums + row * 64,
            peaks + row * 4,
            part + at,
            others + row * 64,
            other_peaks + row * 4,
            head_dim,
        )


@jit_inline
def _finish(rows: int, group: int, head_dim: int, output: int, out: int, out_stride: int) -> None:
    sums, _, _ = part_fields(output, rows, head_dim)
    for row in range(rows):
        target = out + row // group * out_stride + row % group * head_dim * 2
        finish_row(output + row * head_dim * 4, sums + row * 64, head_dim, target)


@jit_inline
def _pack_queries(query: int, stride: int, num_tokens: int, width: int, packed: int) -> None:
    for token in range(num_tokens):
        source, target = u16(query + token * stride), packed + token * width * left_size()
        if left_size() == 4:
            wide = f32(target)
            for i in range(width):
                wide[i] = from_bf16(source[i])
        else:
            half = u16(target)
            for i in range(width):
                half[i] = source[i]


@compiled_function
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
    span: int,
    parts: int,
    scratch: int,
) -> None:
    """out = attention of `num_tokens` tokens, the first at `position`, over `num_heads` KV heads of one row.

    keys and values are the first of these heads in block 0; query and out, bfloat16 [num_tokens, num_heads * group,
    head_dim], step by query_stride bytes per token. window 0 means all keys. With a `span` other than ALL_SPANS only
    its keys are read, and each head's unfinished output goes to `parts`, part_bytes apart.
    """
    rows = num_tokens * group
    room = (max(MAX_QUERIES, group) + 1) // 2 * 2
    stride = part_bytes(rows, head_dim)
    scores = scratch + room * head_dim * left_size()
    own = scores + STRIP_BYTES
    head_bytes = head_dim * block_size * 2
    span_keys = span_tokens(block_size)
    last = position + num_tokens
    first = 0 if window == 0 else max(0, position - window + 1)
    if span != ALL_SPANS:
        first, last = max(first, span * span_keys), min(last, (span + 1) * span_keys)
    # Segments always begin at the same keys, so that their sums are rounded alike in every chunk and batch.
    first -= first % (span_keys // _SEGMENTS_PER_SPAN)
    first_block = np.int64(i32(table)[first // block_size]) * block_stride
    for head in range(num_heads):
        columns = head * group * head_dim * 2
        _pack_queries(query + columns, query_stride, num_tokens, group * head_dim, scratch)
        output = own if span == ALL_SPANS else parts + head * stride
        begin = first
        while begin < last:
            end = min(last, (begin // span_keys + 1) * span_keys)
            part = output if begin == first else own + stride
            following = keys + (head + 1) * head_bytes + first_block
            if end < last:
                following = keys + head * head_bytes + np.int64(i32(table)[end // block_size]) * block_stride
            attend_span(
                rows,
                group,
                head_dim,
                position,
                begin,
                end,
                window,
                keys + head * head_bytes,
                values + head * head_bytes,
                block_stride,
                block_size,
                table,
                scale_bits,
                following,
                scratch,
                scores,
                part,
            )
            if part != output:
                _merge(rows, head_dim, output, part)
            begin = end
        if span == ALL_SPANS:
            _finish(rows, group, head_dim, output, out + columns, query_stride)


@compiled_function
def merge_parts(
    num_parts: int,
    parts: int,
    parts_stride: int,
    num_tokens: int,
    group: int,
    head_dim: int,
    out: int,
    out_stride: int,
) -> None:
    """out = one head's attention from the unfinished outputs of all its spans, which lie parts_stride bytes apart."""
    rows = num_tokens * group
    for index in range(1, num_parts):
        _merge(rows, head_dim, parts, parts + index * parts_stride)
    _finish(rows, group, head_dim, parts, out, out_stride)
