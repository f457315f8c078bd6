"""Attention in the compiled step, from the output of the QKV product to the input of the output product."""

from typing import Any

import numpy as np

from kernels.models.cpu.step_layout import ITEM, WORK
from kernels.ops.cpu.intrinsics import f32, i32, i64, pointer_to, u16
from kernels.ops.cpu.jit import call_stub, jit_inline, numba
from kernels.ops.cpu.tasks import PHASE_BYTES, done, next_tile, wait
from kernels.ops.paged_attention.cpu import attend, merge_parts
from kernels.ops.rotary.cpu import rotate_and_store_phase

_call_rotate_and_store = call_stub(rotate_and_store_phase)
_call_attend = call_stub(attend)
_call_merge_parts = call_stub(merge_parts)

_items_at = pointer_to(numba.from_dtype(ITEM))
_work_at = pointer_to(numba.from_dtype(WORK))


@jit_inline
def attend_and_store(
    step: Any, layer: Any, attention: int, index: int, rows: int, scratch: int, phase: int
) -> None:
    """Write all tokens' K/V into layer `index` of the pool, then compute the WORK at `attention`. Takes four phases.

    With fewer `rows` than tokens, the sampled rows are moved to the front.
    """
    keys, values = step.keys + index * step.layer_kv_bytes, step.values + index * step.layer_kv_bytes
    _rotate_and_store(step, layer, keys, values, phase)
    work = numba.carray(_work_at(attention), 1)[0]
    _attend(step, layer, work, keys, values, scratch, phase + PHASE_BYTES)
    if work.num_merges > 0:
        _merge(step, work, phase + 2 * PHASE_BYTES)
    if rows < step.num_tokens:
        _keep_sampled(step, phase + 3 * PHASE_BYTES)


@jit_inline
def _rotate_and_store(step: Any, layer: Any, keys: int, values: int, phase: int) -> None:
    _call_rotate_and_store(
        step.rotate_and_store_phase,
        rows=step.num_tokens,
        qkv=step.qkv,
        heads=step.heads,
        kv_heads=step.kv_heads,
        size=step.head_dim,
        cos=layer.cos,
        sin=layer.sin,
        positions=step.positions,
        query_gain=layer.query_norm,
        key_gain=layer.key_norm,
        eps_bits=step.eps_bits,
        query=step.query,
        keys=keys,
        values=values,
        block_stride=step.block_kv_bytes,
        block_size=step.block_size,
        slots=step.slots,
        phase=phase,
    )


@jit_inline
def _attend(step: Any, layer: Any, work: Any, keys: int, values: int, scratch: int, phase: int) -> None:
    size, heads = step.head_dim, work.heads_per_task
    group = step.heads // step.kv_heads
    head_bytes = size * step.block_size * 2
    items = numba.carray(_items_at(work.items), work.num_items)
    query_start, context_lens = i32(step.query_start), i32(step.context_lens)
    tasks = step.kv_heads // heads
    num_tiles = work.num_items * tasks
    number = next_tile(phase)
    while number < num_tiles:
        # Prefill chunks come last in the batch and take longest, so they are started first.
        item = items[work.num_items - 1 - number // tasks]
        head = number % tasks * heads
        start, end = np.int64(query_start[item.row]), np.int64(query_start[item.row + 1])
        at = ((start + item.first) * step.heads + head * group) * size * 2
        _call_attend(
            step.attend,
            query=step.query + at,
            query_stride=step.heads * size * 2,
            num_tokens=item.count,
            num_heads=heads,
            group=group,
            head_dim=size,
            position=np.int64(context_lens[item.row]) - (end - start) + item.first,
            window=layer.window,
            keys=keys + head * head_bytes,
            values=values + head * head_bytes,
            block_stride=step.block_kv_bytes,
            block_size=step.block_size,
            table=step.tables + item.row * step.table_stride,
            scale_bits=step.scale_bits,
            out=step.attended + at,
            span=item.span,
            parts=step.parts + (item.part * step.kv_heads + head) * step.part_stride,
            scratch=scratch,
        )
        done(phase, num_tiles)
        number = next_tile(phase)
    wait(phase, num_tiles)


@jit_inline
def _merge(step: Any, work: Any, phase: int) -> None:
    """Merge the parts of rows whose spans were computed as tasks of their own."""
    group, size = step.heads // step.kv_heads, step.head_dim
    merges = numba.carray(_items_at(work.merges), work.num_merges)
    num_tiles = work.num_merges * step.kv_heads
    number = next_tile(phase)
    while number < num_tiles:
        item = merges[number // step.kv_heads]
        head = number % step.kv_heads
        start = np.int64(i32(step.query_start)[item.row]) + item.first
        _call_merge_parts(
            step.merge_parts,
            num_parts=item.span,
            parts=step.parts + (item.part * step.kv_heads + head) * step.part_stride,
            parts_stride=step.kv_heads * step.part_stride,
            num_tokens=item.count,
            group=group,
            head_dim=size,
            out=step.attended + (start * step.heads + head * group) * size * 2,
            out_stride=step.heads * size * 2,
        )
        done(phase, num_tiles)
        number = next_tile(phase)
    wait(phase, num_tiles)


@jit_inline
def _keep_sampled(step: Any, phase: int) -> None:
    """Move the sampled rows of x and of attention's output to the front; their indices are ascending."""
    if next_tile(phase) == 0:
        index = i64(step.sample_indices)
        width = step.heads * step.head_dim
        for row in range(step.num_sampled):
            target, source = f32(step.x + row * step.hidden * 4), f32(step.x + index[row] * step.hidden * 4)
            for i in range(step.hidden):
                target[i] = source[i]
            half, other = u16(step.attended + row * width * 2), u16(step.attended + index[row] * width * 2)
            for i in range(width):
                half[i] = other[i]
        done(phase, 1)
    wait(phase, 1)
