"""A whole forward step as one compiled call: embedding to logits in a single parallel region, without the GIL.

Arithmetic is bfloat16 (or int8) products with float32 sums; the residual stream, norms, rotary and softmax are float32.
"""

from typing import Any

import numpy as np

from kernels.models.cpu.fused_attention import attend_and_store
from kernels.models.cpu.step_layout import LAYER, STEP
from kernels.ops.cpu.bf16 import from_bf16
from kernels.ops.cpu.intrinsics import cycles, f32, fetch_add, float_of, i64, pointer_to, u16
from kernels.ops.cpu.jit import call_stub, compiled_function, jit_inline, numba
from kernels.ops.cpu.tasks import PHASE_BYTES, START_STAMP, done, next_tile, wait
from kernels.ops.linear.cpu import ADD, LINEAR_BYTES, NUM_GROUPS, NUM_INPUTS, STORE, linear_phase
from kernels.ops.paged_attention.cpu import attend, merge_parts
from kernels.ops.rms_norm.cpu import add_norm_phase, quantize_phase, rms_norm_phase
from kernels.ops.rotary.cpu import rotate_and_store_phase

PHASES_PER_LAYER = 12
_ATTENTION_PHASES = 8
EXTRA_PHASES = 3
_ROWS_PER_TILE = 8

COMPILED = (
    linear_phase,
    rms_norm_phase,
    add_norm_phase,
    quantize_phase,
    rotate_and_store_phase,
    attend,
    merge_parts,
)

_call_linear = call_stub(linear_phase)
_call_rms_norm = call_stub(rms_norm_phase)
_call_add_norm = call_stub(add_norm_phase)
_call_quantize = call_stub(quantize_phase)

QKV, OUT, GATE_UP, DOWN = 0, 1, 2, 3
LINEARS_PER_LAYER = 4


_step_at = pointer_to(numba.from_dtype(STEP))
_layers_at = pointer_to(numba.from_dtype(LAYER))


@compiled_function
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
    post_mlp_norm = 0
    for index in range(step.num_layers):
        own = linears + index * LINEARS_PER_LAYER * LINEAR_BYTES
        phase = step.counters + (1 + index * PHASES_PER_LAYER) * PHASE_BYTES
        layer = layers[index]
        attention = layer.work
        if step.only_sampled != 0 and index + 1 == step.num_layers:
            # Only sampled rows are read after the last layer; of the others just keys and values are needed.
            attention, rows = step.last_work, step.num_sampled
        _attention_half(step, layer, post_mlp_norm, attention, own, index, rows, scratch, phase)
        _mlp_half(step, layer, own, rows, scratch, phase + _ATTENTION_PHASES * PHASE_BYTES)
        post_mlp_norm = layer.post_mlp_norm
    phase = step.counters + (1 + step.num_layers * PHASES_PER_LAYER) * PHASE_BYTES
    head = linears + step.num_layers * LINEARS_PER_LAYER * LINEAR_BYTES
    index = 0 if step.only_sampled != 0 else step.sample_indices
    _norm(step, step.num_sampled, index, post_mlp_norm, step.final_norm, head, scratch, phase)
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


@jit_inline
def _embed(step: Any, phase: int) -> None:
    num_tiles = (step.num_tokens + _ROWS_PER_TILE - 1) // _ROWS_PER_TILE
    size, scale = step.hidden, float_of(np.uint32(step.embedding_scale_bits))
    number = next_tile(phase)
    while number < num_tiles:
        for row in range(number * _ROWS_PER_TILE, min((number + 1) * _ROWS_PER_TILE, step.num_tokens)):
            source = u16(step.embedding + i64(step.token_ids)[row] * size * 2)
            target = f32(step.x + row * size * 4)
            for i in range(size):
                target[i] = from_bf16(source[i]) * scale
        done(phase, num_tiles)
        number = next_tile(phase)
    wait(phase, num_tiles)


@jit_inline
def _norm(
    step: Any, rows: int, index: int, branch_norm: int, weight: int, linear: int, scratch: int, phase: int
) -> None:
    """Compute the input of `linear`: normed rows of x, quantized if the product is.

    With a `branch_norm`, the normed output of the last product, in `branch`, is added to x first.
    """
    quantized = step.quantized != 0
    groups = i64(linear)[NUM_GROUPS] if quantized else 0
    ldo = step.hidden if quantized else step.hidden * 2
    if branch_norm != 0:
        _call_add_norm(
            step.add_norm_phase,
            rows=rows,
            index=index,
            x=step.x,
            size=step.hidden,
            branch=step.branch,
            branch_weight=branch_norm,
            weight=weight,
            eps_bits=step.eps_bits,
            groups=groups,
            out=step.normed,
            ldo=ldo,
            scales=step.scales,
            scratch=scratch,
            phase=phase,
        )
        return
    _call_rms_norm(
        step.rms_norm_phase,
        rows=rows,
        index=index,
        x=step.x,
        size=step.hidden,
        weight=weight,
        eps_bits=step.eps_bits,
        groups=groups,
        out=step.normed,
        ldo=ldo,
        scales=step.scales,
        scratch=scratch,
        phase=phase,
    )


@jit_inline
def _linear(
    step: Any, linear: int, mode: int, rows: int, a: int, out: int, ldo: int, scratch: int, phase: int
) -> None:
    lda = i64(linear)[NUM_INPUTS] * (1 if step.quantized != 0 else 2)
    _call_linear(
        step.linear_phase,
        linear=linear,
        mode=mode,
        rows=rows,
        a=a,
        lda=lda,
        a_scales=step.scales,
        out=out,
        ldo=ldo,
        scratch=scratch,
        phase=phase,
    )


@jit_inline
def _add_linear(
    step: Any, linear: int, rows: int, a: int, branch_norm: int, scratch: int, phase: int
) -> None:
    """x[rows] += linear(a[rows]) or, with a branch_norm, branch = linear(a), which the next norm adds. Two phases."""
    if step.quantized != 0:
        size = i64(linear)[NUM_INPUTS]
        _call_quantize(
            step.quantize_phase,
            rows=rows,
            x=a,
            size=size,
            groups=i64(linear)[NUM_GROUPS],
            out=step.codes,
            ldo=size,
            scales=step.scales,
            scratch=scratch,
            phase=phase,
        )
        a = step.codes
    mode, out = (ADD, step.x) if branch_norm == 0 else (STORE, step.branch)
    _linear(step, linear, mode, rows, a, out, step.hidden * 4, scratch, phase + PHASE_BYTES)


@jit_inline
def _attention_half(
    step: Any,
    layer: Any,
    post_mlp_norm: int,
    attention: int,
    own: int,
    index: int,
    rows: int,
    scratch: int,
    phase: int,
) -> None:
    """`post_mlp_norm` is the previous layer's."""
    _norm(step, step.num_tokens, 0, post_mlp_norm, layer.input_norm, own + QKV * LINEAR_BYTES, scratch, phase)
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
    attend_and_store(step, layer, attention, index, rows, scratch, phase + 2 * PHASE_BYTES)
    _add_linear(
        step,
        own + OUT * LINEAR_BYTES,
        rows,
        step.attended,
        layer.post_attention_norm,
        scratch,
        phase + 6 * PHASE_BYTES,
    )


@jit_inline
def _mlp_half(step: Any, layer: Any, own: int, rows: int, scratch: int, phase: int) -> None:
    _norm(
        step, rows, 0, layer.post_attention_norm, layer.mlp_norm, own + GATE_UP * LINEAR_BYTES, scratch, phase
    )
    ldo = step.intermediate * 2
    _linear(
        step,
        own + GATE_UP * LINEAR_BYTES,
        step.activation,
        rows,
        step.normed,
        step.mid,
        ldo,
        scratch,
        phase + PHASE_BYTES,
    )
    _add_linear(
        step, own + DOWN * LINEAR_BYTES, rows, step.mid, layer.post_mlp_norm, scratch, phase + 2 * PHASE_BYTES
    )
