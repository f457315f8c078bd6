"""A compiled step's attention, between the products before it and after it."""

from typing import Any

import numpy as np

from kernels.models.cpu.step_layout import ITEM, WORK
from kernels.ops.cpu.intrinsics import f32, i32, i64, pointer_to, u16
from kernels.ops.cpu.jit import call, device, numba
from kernels.ops.cpu.tasks import PHASE_BYTES, done, draw, wait

_items_at = pointer_to(numba.from_dtype(ITEM))
_work_at = pointer_to(numba.from_dtype(WORK))


@device
def attend_and_store(
    step: Any, layer: Any, attention: int, index: int, rows: int, scratch: int, phase: int
) -> None:
    """Keys and values of all tokens into layer `index` of the pool, attention of the WORK at `attention`; four phases.

    With fewer `rows` than tokens the sampled ones end up in front.
    """
    keys, values = step.keys + index * step.layer_kv_bytes, step.values + index * step.layer_kv_bytes
    _rotate_and_store(step, layer, keys, values, phase)
    work = numba.carray(_work_at(attention), 1)[0]
    _attend(step, layer, work, keys, values, scratch, phase + PHASE_BYTES)
    if work.num_merges > 0:
        _merge(step, work, phase + 2 * PHASE_BYTES)
    if rows < step.num_tokens:
        _keep_sampled(step, phase + 3 * PHASE_BYTES)


@device
def _rotate_and_store(step: Any, layer: Any, keys: int, values: int, phase: int) -> None:
    call(
        step.rotate_and_store_phase,
        step.num_tokens,
        step.qkv,
        step.heads,
        step.kv_heads,
        step.head_dim,
        layer.cos,
        layer.sin,
        step.positions,
        layer.query_norm,
        layer.key_norm,
        step.eps_bits,
        step.query,
        keys,
        values,
        step.block_kv_bytes,
        step.block_size,
        step.slots,
        phase,
    )


@device
def _attend(step: Any, layer: Any, work: Any, keys: int, values: int, scratch: int, phase: int) -> None:
    size, heads = step.head_dim, work.heads_per_task
    group = step.heads // step.kv_heads
    head_bytes = size * step.block_size * 2
    items = numba.carray(_items_at(work.items), work.num_items)
    query_start, context_lens = i32(step.query_start), i32(step.context_lens)
    tasks = step.kv_heads // heads
    num_tiles = work.num_items * tasks
    number = draw(phase)
    while number < num_tiles:
        # Prefill chunks come last in the batch and take longest: they are begun first.
        item = items[work.num_items - 1 - number // tasks]
        head = number % tasks * heads
        start, end = np.int64(query_start[item.row]), np.int64(query_start[item.row + 1])
        at = ((start + item.first) * step.heads + head * group) * size * 2
        call(
            step.attend,
            step.query + at,
            step.heads * size * 2,
            item.count,
            heads,
            group,
            size,
            np.int64(context_lens[item.row]) - (end - start) + item.first,
            layer.window,
            keys + head * head_bytes,
            values + head * head_bytes,
            step.block_kv_bytes,
            step.block_size,
            step.tables + item.row * step.table_stride,
            step.scale_bits,
            step.attended + at,
            item.span,
            step.parts + (item.part * step.kv_heads + head) * step.part_stride,
            scratch,
        )
        done(phase, num_tiles)
        number = draw(phase)
    wait(phase, num_tiles)


@device
def _merge(step: Any, work: Any, phase: int) -> None:
    """Rows whose spans were shared out: their parts become one."""
    group, size = step.heads // step.kv_heads, step.head_dim
    merges = numba.carray(_items_at(work.merges), work.num_merges)
    num_tiles = work.num_merges * step.kv_heads
    number = draw(phase)
    while number < num_tiles:
        item = merges[number // step.kv_heads]
        head = number % step.kv_heads
        start = np.int64(i32(step.query_start)[item.row]) + item.first
        call(
            step.merge_parts,
            item.span,
            step.parts + (item.part * step.kv_heads + head) * step.part_stride,
            step.kv_heads * step.part_stride,
            item.count,
            group,
            size,
            step.attended + (start * step.heads + head * group) * size * 2,
            step.heads * size * 2,
        )
        done(phase, num_tiles)
        number = draw(phase)
    wait(phase, num_tiles)


@device
def _keep_sampled(step: Any, phase: int) -> None:
    """Bring the sampled rows of x and of attention's output to the front; their indices rise."""
    if draw(phase) == 0:
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
