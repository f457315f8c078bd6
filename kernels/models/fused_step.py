"""A whole forward step as one compiled call: embedding to logits in a single parallel region, without the GIL.

Arithmetic is bfloat16 (or int8) products with float32 sums; the residual stream, norms, rotary and softmax are float32.
"""

from typing import Any

import numpy as np

from kernels.ops.cpu.intrinsics import cycles, f32, fetch_add, i32, i64, pointer_to, u16
from kernels.ops.cpu.jit import call, device, numba, unit
from kernels.ops.cpu.tasks import PHASE_BYTES, START_STAMP, done, draw, wait
from kernels.ops.cpu.vector_math import from_bf16
from kernels.ops.linear.cpu import ADD, LINEAR_BYTES, NUM_GROUPS, NUM_INPUTS, SILU_MUL, STORE, linear_phase
from kernels.ops.paged_attention.cpu import attend
from kernels.ops.rms_norm.cpu import quantize_phase, rms_norm_phase
from kernels.ops.rotary.cpu import rotate_and_store_phase

PHASES_PER_LAYER = 10
EXTRA_PHASES = 3
_ROWS_PER_TILE = 8
_ITEMS_FOR_WHOLE_ROWS = 16

_ADDRESSES = (
    "layers linears embedding token_ids positions slots tables query_start context_lens sample_indices items "
    "final_norm cos sin keys values x normed scales qkv query attended mid codes logits counters scratch"
)
UNITS = (linear_phase, rms_norm_phase, quantize_phase, rotate_and_store_phase, attend)
UNIT_NAMES = ("linear_phase", "rms_norm_phase", "quantize_phase", "rotate_and_store_phase", "attend")
_NUMBERS = (
    "num_layers hidden heads kv_heads head_dim intermediate block_size window quantized eps_bits scale_bits "
    "num_tokens num_sampled num_items table_stride layer_kv_bytes block_kv_bytes scratch_stride "
    "qkv_width logits_width"
)
STEP = np.dtype(
    [(name, np.int64) for name in ("num_started", *_ADDRESSES.split(), *_NUMBERS.split(), *UNIT_NAMES)]
)
"""Everything a step reads and writes: a counter of threads, addresses, sizes (strides in bytes), units."""

LAYER = np.dtype([(name, np.int64) for name in ("input_norm", "post_norm", "query_norm", "key_norm")])
"""Addresses of a layer's float32 norm weights; the last two 0 where the model has none."""

QKV, OUT, GATE_UP, DOWN = 0, 1, 2, 3
LINEARS_PER_LAYER = 4


_step_at = pointer_to(numba.from_dtype(STEP))
_layers_at = pointer_to(numba.from_dtype(LAYER))


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
    for index in range(step.num_layers):
        own = linears + index * LINEARS_PER_LAYER * LINEAR_BYTES
        phase = step.counters + (1 + index * PHASES_PER_LAYER) * PHASE_BYTES
        _attention_half(step, layers[index], own, index, scratch, phase)
        _mlp_half(step, layers[index], own, scratch, phase + 5 * PHASE_BYTES)
    phase = step.counters + (1 + step.num_layers * PHASES_PER_LAYER) * PHASE_BYTES
    head = linears + step.num_layers * LINEARS_PER_LAYER * LINEAR_BYTES
    _norm(step, step.num_sampled, step.sample_indices, step.final_norm, head, scratch, phase)
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
def _add_linear(step: Any, linear: int, a: int, scratch: int, phase: int) -> None:
    """x += linear(a); takes two phases."""
    if step.quantized != 0:
        size = i64(linear)[NUM_INPUTS]
        call(
            step.quantize_phase,
            step.num_tokens,
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
    _linear(step, linear, ADD, step.num_tokens, a, step.x, step.hidden * 4, scratch, phase + PHASE_BYTES)


@device
def _attention_half(step: Any, layer: Any, own: int, index: int, scratch: int, phase: int) -> None:
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
    _attend(step, keys, values, scratch, phase + 3 * PHASE_BYTES)
    _add_linear(step, own + OUT * LINEAR_BYTES, step.attended, scratch, phase + 4 * PHASE_BYTES)


@device
def _mlp_half(step: Any, layer: Any, own: int, scratch: int, phase: int) -> None:
    phase += PHASE_BYTES
    _norm(step, step.num_tokens, 0, layer.post_norm, own + GATE_UP * LINEAR_BYTES, scratch, phase)
    ldo = step.intermediate * 2
    _linear(
        step,
        own + GATE_UP * LINEAR_BYTES,
        SILU_MUL,
        step.num_tokens,
        step.normed,
        step.mid,
        ldo,
        scratch,
        phase + PHASE_BYTES,
    )
    _add_linear(step, own + DOWN * LINEAR_BYTES, step.mid, scratch, phase + 2 * PHASE_BYTES)


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
def _attend(step: Any, keys: int, values: int, scratch: int, phase: int) -> None:
    size, kv_heads = step.head_dim, step.kv_heads
    group = step.heads // kv_heads
    # With work for everyone a thread takes all heads of an item, and its blocks come in one stream.
    heads = kv_heads if step.num_items >= _ITEMS_FOR_WHOLE_ROWS else 1
    head_bytes = size * step.block_size * 2
    items, query_start, context_lens = i32(step.items), i32(step.query_start), i32(step.context_lens)
    parts = kv_heads // heads
    num_tiles = step.num_items * parts
    number = draw(phase)
    while number < num_tiles:
        # Prefill chunks come last in the batch and take longest: they are begun first.
        item = step.num_items - 1 - number // parts
        head = number % parts
        row, begin, count = (
            np.int64(items[3 * item]),
            np.int64(items[3 * item + 1]),
            np.int64(items[3 * item + 2]),
        )
        start, end = np.int64(query_start[row]), np.int64(query_start[row + 1])
        at = ((start + begin) * step.heads + head * group) * size * 2
        call(
            step.attend,
            step.query + at,
            step.heads * size * 2,
            count,
            heads,
            group,
            size,
            np.int64(context_lens[row]) - (end - start) + begin,
            step.window,
            keys + head * head_bytes,
            values + head * head_bytes,
            step.block_kv_bytes,
            step.block_size,
            step.tables + row * step.table_stride,
            step.scale_bits,
            step.attended + at,
            scratch,
        )
        done(phase, num_tiles)
        number = draw(phase)
    wait(phase, num_tiles)
