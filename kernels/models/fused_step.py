"""A whole forward step as one compiled call: embedding to logits in a single parallel region, without the GIL.

Arithmetic is bfloat16 (or int8) products with float32 sums; the residual stream, norms, rotary and softmax are float32.
"""

from typing import Any

import numpy as np

from kernels.models.step_layout import ITEM, LAYER, STEP, WORK
from kernels.ops.cpu.intrinsics import cycles, f32, fetch_add, i32, i64, pointer_to, u16
from kernels.ops.cpu.jit import call, device, numba, unit
from kernels.ops.cpu.tasks import PHASE_BYTES, START_STAMP, done, draw, wait
from kernels.ops.cpu.vector_math import from_bf16
from kernels.ops.linear.cpu import ADD, LINEAR_BYTES, NUM_GROUPS, NUM_INPUTS, SILU_MUL, STORE, linear_phase
from kernels.ops.paged_attention.cpu import attend, merge_parts
from kernels.ops.rms_norm.cpu import quantize_phase, rms_norm_phase
from kernels.ops.rotary.cpu import rotate_and_store_phase

PHASES_PER_LAYER = 12
_ATTENTION_PHASES = 8
EXTRA_PHASES = 3
_ROWS_PER_TILE = 8

UNITS = (linear_phase, rms_norm_phase, quantize_phase, rotate_and_store_phase, attend, merge_parts)

QKV, OUT, GATE_UP, DOWN = 0, 1, 2, 3
LINEARS_PER_LAYER = 4


_step_at = pointer_to(numba.from_dtype(STEP))
_layers_at = pointer_to(numba.from_dtype(LAYER))
_items_at = pointer_to(numba.from_dtype(ITEM))
_work_at = pointer_to(numba.from_dtype(WORK))


@unit
def work(address: int) -> None:
    """One thread's share of the STEP at `address`; run it on as many threads as the step has scratch for."""
    step = numba.carray(_step_at(address), 1)[0]
    layers = numba.carray(_layers_at(step.layers), step.num_layers)
    linears = step.linears
    scratch = step.scratch + fetch_add(address, 1) * step.scratch_stride
    start = i64(step.counters + START_STAMP)
    if start[0] == 0:
        start[0] = cycles()
    _embed(step, step.counters)
    rows = step.num_tokens
    for index in range(step.num_layers):
        own = linears + index * LINEARS_PER_LAYER * LINEAR_BYTES
        phase = step.counters + (1 + index * PHASES_PER_LAYER) * PHASE_BYTES
        attention = step.work
        if step.only_sampled != 0 and index + 1 == step.num_layers:
            # Nobody asks for the last layer's other rows: of these only keys and values are needed.
            attention, rows = step.last_work, step.num_sampled
        _attention_half(step, layers[index], attention, own, index, rows, scratch, phase)
        _mlp_half(step, layers[index], own, rows, scratch, phase + _ATTENTION_PHASES * PHASE_BYTES)
    phase = step.counters + (1 + step.num_layers * PHASES_PER_LAYER) * PHASE_BYTES
    head = linears + step.num_layers * LINEARS_PER_LAYER * LINEAR_BYTES
    index = 0 if step.only_sampled != 0 else step.sample_indices
    _norm(step, step.num_sampled, index, step.final_norm, head, scratch, phase)
    _linear(
        step,
        head,
        STORE,
        step.num_sampled,
        step.normed,
        step.logits,
        step.logits_width,
        scratch,
        phase + PHASE_BYTES,
    )


@device
def _embed(step: Any, phase: int) -> None:
    num_tiles = (step.num_tokens + _ROWS_PER_TILE - 1) // _ROWS_PER_TILE
    size = step.hidden
    number = draw(phase)
    while number < num_tiles:
        for row in range(number * _ROWS_PER_TILE, min((number + 1) * _ROWS_PER_TILE, step.num_tokens)):
            source = u16(step.embedding + i64(step.token_ids)[row] * size * 2)
            target = f32(step.x + row * size * 4)
            for i in range(size):
                target[i] = from_bf16(source[i])
        done(phase, num_tiles)
        number = draw(phase)
    wait(phase, num_tiles)


@device
def _norm(step: Any, rows: int, index: int, weight: int, linear: int, scratch: int, phase: int) -> None:
    """The input of `linear`: normed rows of x, quantized where the product is."""
    quantized = step.quantized != 0
    call(
        step.rms_norm_phase,
        rows,
        index,
        step.x,
        step.hidden,
        weight,
        step.eps_bits,
        i64(linear)[NUM_GROUPS] if quantized else 0,
        step.normed,
        step.hidden if quantized else step.hidden * 2,
        step.scales,
        scratch,
        phase,
    )


@device
def _linear(
    step: Any, linear: int, mode: int, rows: int, a: int, out: int, ldo: int, scratch: int, phase: int
) -> None:
    lda = i64(linear)[NUM_INPUTS] * (1 if step.quantized != 0 else 2)
    call(step.linear_phase, linear, mode, rows, a, lda, step.scales, out, ldo, scratch, phase)


@device
def _add_linear(step: Any, linear: int, rows: int, a: int, scratch: int, phase: int) -> None:
    """x[rows] += linear(a[rows]); takes two phases."""
    if step.quantized != 0:
        size = i64(linear)[NUM_INPUTS]
        call(
            step.quantize_phase,
            rows,
            a,
            size,
            i64(linear)[NUM_GROUPS],
            step.codes,
            size,
            step.scales,
            scratch,
            phase,
        )
        a = step.codes
    _linear(step, linear, ADD, rows, a, step.x, step.hidden * 4, scratch, phase + PHASE_BYTES)


@device
def _attention_half(
    step: Any, layer: Any, attention: int, own: int, index: int, rows: int, scratch: int, phase: int
) -> None:
    _norm(step, step.num_tokens, 0, layer.input_norm, own + QKV * LINEAR_BYTES, scratch, phase)
    _linear(
        step,
        own + QKV * LINEAR_BYTES,
        STORE,
        step.num_tokens,
        step.normed,
        step.qkv,
        step.qkv_width,
        scratch,
        phase + PHASE_BYTES,
    )
    keys, values = step.keys + index * step.layer_kv_bytes, step.values + index * step.layer_kv_bytes
    _rotate_and_store(step, layer, keys, values, phase + 2 * PHASE_BYTES)
    work = numba.carray(_work_at(attention), 1)[0]
    _attend(step, work, keys, values, scratch, phase + 3 * PHASE_BYTES)
    if work.num_merges > 0:
        _merge(step, work, phase + 4 * PHASE_BYTES)
    if rows < step.num_tokens:
        _keep_sampled(step, phase + 5 * PHASE_BYTES)
    _add_linear(step, own + OUT * LINEAR_BYTES, rows, step.attended, scratch, phase + 6 * PHASE_BYTES)


@device
def _mlp_half(step: Any, layer: Any, own: int, rows: int, scratch: int, phase: int) -> None:
    _norm(step, rows, 0, layer.post_norm, own + GATE_UP * LINEAR_BYTES, scratch, phase)
    ldo = step.intermediate * 2
    _linear(
        step,
        own + GATE_UP * LINEAR_BYTES,
        SILU_MUL,
        rows,
        step.normed,
        step.mid,
        ldo,
        scratch,
        phase + PHASE_BYTES,
    )
    _add_linear(step, own + DOWN * LINEAR_BYTES, rows, step.mid, scratch, phase + 2 * PHASE_BYTES)


@device
def _rotate_and_store(step: Any, layer: Any, keys: int, values: int, phase: int) -> None:
    call(
        step.rotate_and_store_phase,
        step.num_tokens,
        step.qkv,
        step.heads,
        step.kv_heads,
        step.head_dim,
        step.cos,
        step.sin,
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
def _attend(step: Any, work: Any, keys: int, values: int, scratch: int, phase: int) -> None:
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
            step.window,
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
