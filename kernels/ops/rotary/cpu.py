"""Head norm, rotary and the write into the pool, in one pass over the fused q, k, v."""

import numpy as np
import torch

from kernels.ops.cpu.intrinsics import f32, float_of, i64, u16, u32
from kernels.ops.cpu.jit import Float, device, unit
from kernels.ops.cpu.tasks import done, draw, lone_phase, wait
from kernels.ops.cpu.vector_math import to_bf16
from kernels.ops.rms_norm.cpu import inverse_rms

_ROWS_PER_TILE = 8


@device
def _rotate(x: int, size: int, cos: int, sin: int, gain: int, eps: Float) -> None:
    """Turn one float32 head in place; gain is the address of its norm weight, or 0."""
    half = size // 2
    first, second, c, s = f32(x), f32(x + half * 4), f32(cos), f32(sin)
    if gain != 0:
        factor = inverse_rms(x, size, eps)
        weight = f32(gain)
        for i in range(size):
            first[i] = first[i] * factor * weight[i]
    for i in range(half):
        a, b = first[i], second[i]
        first[i] = a * c[i] - b * s[i]
        second[i] = b * c[i] + a * s[i]


@device
def _narrow(x: int, size: int, out: int) -> None:
    value, half = f32(x), u16(out)
    for i in range(size):
        half[i] = to_bf16(value[i])


@device
def _store_key(x: int, size: int, block: int, block_size: int, offset: int) -> None:
    """Write one float32 head into a key block [size / 2, block_size, 2]."""
    value, pair = f32(x), u32(block + offset * 4)
    for i in range(size // 2):
        pair[i * block_size] = np.uint32(to_bf16(value[2 * i])) | np.uint32(
            to_bf16(value[2 * i + 1])
        ) << np.uint32(16)


@device
def _store_value(x: int, size: int, block: int, offset: int, alone: bool) -> None:
    """Write one float32 head into a value block [block_size / 2, size, 2].

    alone: the partner in its pair is not written yet; it gets 0, for whatever a freed block left there is
    multiplied by a weight of 0, and that is not 0 if it was NaN.
    """
    value, pair = f32(x), u16(block + (offset // 2) * size * 4)
    if offset % 2 == 0 and alone:
        both = u32(block + (offset // 2) * size * 4)
        for i in range(size):
            both[i] = np.uint32(to_bf16(value[i]))
    else:
        for i in range(size):
            pair[2 * i + offset % 2] = to_bf16(value[i])


@unit
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
    num_tiles = (rows + _ROWS_PER_TILE - 1) // _ROWS_PER_TILE
    number = draw(phase)
    while number < num_tiles:
        for row in range(number * _ROWS_PER_TILE, min((number + 1) * _ROWS_PER_TILE, rows)):
            angle = position_of[row] * (size // 2) * 4
            head = qkv + row * (heads + 2 * kv_heads) * size * 4
            for index in range(heads):
                _rotate(head, size, cos + angle, sin + angle, query_gain, eps)
                _narrow(head, size, query + (row * heads + index) * size * 2)
                head += size * 4
            slot = slot_of[row]
            block, offset = slot // block_size * block_stride, slot % block_size
            alone = row + 1 == rows or slot_of[row + 1] != slot + 1
            for index in range(kv_heads):
                _rotate(head, size, cos + angle, sin + angle, key_gain, eps)
                _store_key(head, size, keys + block + index * head_bytes, block_size, offset)
                value = head + kv_heads * size * 4
                _store_value(value, size, values + block + index * head_bytes, offset, alone)
                head += size * 4
        done(phase, num_tiles)
        number = draw(phase)
    wait(phase, num_tiles)


def rotate_and_store(
    qkv: torch.Tensor,
    num_heads: int,
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    slot_mapping: torch.Tensor,
    gains: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotated queries of float32 qkv [num_tokens, all heads, head_dim]; keys and values go into one layer's blocks.

    tables: cos and sin of every position; gains: norm weights of query and key heads. Overwrites qkv; caller's thread.
    """
    num_kv_heads, lanes, block_size = key_blocks.shape[1:4]
    query = torch.empty(qkv.shape[0], num_heads, lanes * 2, dtype=torch.bfloat16)
    phase = lone_phase()
    rotate_and_store_phase(
        qkv.shape[0],
        qkv.data_ptr(),
        num_heads,
        num_kv_heads,
        lanes * 2,
        tables[0].data_ptr(),
        tables[1].data_ptr(),
        positions.data_ptr(),
        gains[0].data_ptr() if gains else 0,
        gains[1].data_ptr() if gains else 0,
        int(np.float32(eps).view(np.uint32)),
        query.data_ptr(),
        key_blocks.data_ptr(),
        value_blocks.data_ptr(),
        key_blocks[0].nbytes,
        block_size,
        slot_mapping.data_ptr(),
        phase.data_ptr(),
    )
    return query
