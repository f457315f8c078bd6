"""Inputs of realistic size for one op at a time, for the tuner and the benchmark."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.batch import ForwardBatch
from kernels.ops.block_copy.gpu import copy_blocks
from kernels.ops.embed_tokens.gpu import embed_tokens
from kernels.ops.paged_attention.gpu import paged_attention
from kernels.ops.rms_norm.gpu import rms_norm
from kernels.ops.sampling.gpu import Histories, SamplingInputs, SlotCounts, sample
from kernels.ops.sampling.gpu_counts import update_counts
from kernels.ops.silu_mul.gpu import silu_mul
from kernels.ops.store_kv.gpu import KVBlocks, Rotary, store_kv
from kernels.runtime.gpu.step_inputs import RING_TOKENS

BLOCK_SIZE = 16
Workload = Callable[[], object]


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """`num_rows` rows of `new_tokens` tokens each; `context_len` includes them."""

    num_rows: int
    new_tokens: int
    context_len: int
    head_dim: int = 128
    num_heads: int = 32
    num_kv_heads: int = 8

    @property
    def kv_bytes(self) -> int:
        """Bytes of K/V that decoding reads, for 16-bit elements."""
        return 2 * self.num_rows * self.context_len * self.num_kv_heads * self.head_dim * 2


def attention(sizes: AttentionSizes, device: torch.device, dtype: torch.dtype) -> Workload:
    """Return attention of rows whose blocks are scattered over the pool."""
    width = -(-sizes.context_len // BLOCK_SIZE)
    num_blocks = sizes.num_rows * width
    shape = (num_blocks, sizes.num_kv_heads, BLOCK_SIZE, sizes.head_dim)
    kv = KVBlocks(*_random_pair(shape, device, dtype))
    batch = decode_batch(sizes.num_rows, sizes.new_tokens, sizes.context_len, device)
    query = torch.randn(
        sizes.num_rows * sizes.new_tokens, sizes.num_heads, sizes.head_dim, device=device, dtype=dtype
    )
    return lambda: paged_attention(query, kv, batch, scale=sizes.head_dim**-0.5)


def decode_batch(num_rows: int, new_tokens: int, context_len: int, device: torch.device) -> ForwardBatch:
    """Return equal rows whose blocks are in random order, so that no row's are adjacent."""
    width = -(-context_len // BLOCK_SIZE)
    order = torch.randperm(num_rows * width, generator=torch.Generator().manual_seed(0))
    tables = order.view(num_rows, width).to(torch.int32)
    positions = torch.arange(context_len - new_tokens, context_len)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    num_tokens = num_rows * new_tokens
    return ForwardBatch(
        token_ids=(torch.arange(num_tokens) % 97).to(device),
        positions=positions.repeat(num_rows).to(device),
        slot_mapping=slots.flatten().to(device),
        block_tables=tables.to(device),
        query_start=(torch.arange(num_rows + 1) * new_tokens).to(device, torch.int32),
        context_lens=torch.full((num_rows,), context_len, dtype=torch.int32, device=device),
        sample_indices=((torch.arange(num_rows) + 1) * new_tokens - 1).to(device),
        num_decode_rows=num_rows if new_tokens == 1 else 0,
    )


def tuning_workload(op: str, bucket: str, device: torch.device, *, scale: int = 1) -> Workload:
    """Return the workload for an entry of the tuning table; `scale` > 1 divides sizes, for a run without a GPU.

    Raises KeyError for an op without a workload.
    """
    dtype = torch.bfloat16
    if op == "paged_decode":
        return attention(AttentionSizes(32 // scale, 1, 8192 // scale, int(bucket[1:])), device, dtype)
    if op == "paged_prefill":
        return attention(AttentionSizes(2, 2048 // scale, 4096 // scale, int(bucket[1:])), device, dtype)
    if op == "store_kv":
        return _store_kv(2048 // scale, int(bucket[1:]), device, dtype)
    if op == "rms_norm":
        size = int(bucket[1:])
        x, residual = _random_pair((2048 // scale, size), device, dtype)
        weight = torch.ones(size, device=device, dtype=dtype)
        return lambda: rms_norm(x, weight, 1e-6, residual=residual)
    if op == "silu_mul":
        gate_up = torch.randn(2048 // scale, 2 * 14336, device=device, dtype=dtype)
        return lambda: silu_mul(gate_up)
    if op == "block_copy":
        pool = torch.zeros(4, 2, 512, 8, BLOCK_SIZE, 128, device=device, dtype=dtype)
        source = torch.arange(256 // scale, dtype=torch.int32, device=device)
        return lambda: copy_blocks(pool, source, source + 256)
    if op == "embed_tokens":
        return _embed_tokens(2048 // scale, device, dtype)
    if op == "token_counts":
        return _token_counts(32 // scale, 128256 // scale, device)
    if op == "sampling":
        return sampling(32 // scale, 128256 // scale, device)
    raise KeyError(f"op is {op!r}; it has no workload")


def sampling(num_rows: int, vocab_size: int, device: torch.device) -> Workload:
    """Sampling with top-k and top-p, the most expensive filters, in every row."""
    line = torch.tensor([1.0, 0.9, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    inputs = SamplingInputs(
        parameters=line.repeat(num_rows, 1).to(device),
        top_ks=torch.full((num_rows,), 50, dtype=torch.int32, device=device),
        seeds=torch.arange(num_rows, device=device),
        positions=torch.arange(num_rows, device=device),
        slots=torch.arange(num_rows, dtype=torch.int32, device=device),
        ring=torch.zeros((num_rows, RING_TOKENS), dtype=torch.int32, device=device),
    )
    logits = torch.randn(num_rows, vocab_size, device=device)
    return lambda: sample(logits, inputs)


def _embed_tokens(num_tokens: int, device: torch.device, dtype: torch.dtype) -> Workload:
    """Look up tokens of which half are pending."""
    embedding = torch.randn(1000, 4096, device=device, dtype=dtype)
    ring = torch.zeros((num_tokens, RING_TOKENS), dtype=torch.int32, device=device)
    positions = torch.arange(num_tokens, device=device)
    token_ids = torch.where(positions % 2 == 0, positions % 1000, -1 - positions)
    return lambda: embed_tokens(token_ids, positions, ring, embedding)


def _token_counts(num_rows: int, vocab_size: int, device: torch.device) -> Workload:
    """Every row resets its slot's counts with a prompt of 100 tokens, the most expensive case."""
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    ids = torch.arange(100 * num_rows, dtype=torch.int32, device=device) % vocab_size
    histories = Histories(torch.arange(num_rows + 1, dtype=torch.int32, device=device) * 100, ids, ids)
    counts = SlotCounts(
        torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device), torch.zeros_like(slots).long()
    )
    ring = torch.zeros((num_rows, RING_TOKENS), dtype=torch.int32, device=device)
    return lambda: update_counts(slots, slots.long(), ring, counts, histories)


def _store_kv(num_tokens: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Workload:
    kv = KVBlocks(*_random_pair((num_tokens // BLOCK_SIZE + 1, 8, BLOCK_SIZE, head_dim), device, dtype))
    angles = torch.randn(num_tokens, head_dim // 2, device=device)
    rotary = Rotary(angles.cos(), angles.sin())
    positions = torch.arange(num_tokens, device=device)
    qkv = torch.randn(num_tokens, 48 * head_dim, device=device, dtype=dtype)
    return lambda: store_kv(qkv, positions, positions, rotary, kv)


def _random_pair(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)
