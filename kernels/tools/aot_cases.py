"""The launches that are compiled ahead: real calls of the ops, on meta tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernels.batch import ForwardBatch
from kernels.ops.block_copy.gpu import copy_blocks
from kernels.ops.embed_tokens.gpu import embed_tokens
from kernels.ops.paged_attention.gpu import paged_attention
from kernels.ops.rms_norm.gpu import rms_norm
from kernels.ops.sampling.gpu import Allowed, Bias, Histories, Penalties, SamplingInputs, SlotCounts, sample
from kernels.ops.sampling.gpu_counts import update_counts
from kernels.ops.silu_mul.gpu import silu_mul
from kernels.ops.store_kv.gpu import HeadNorm, KVBlocks, Rotary, store_kv
from kernels.runtime.gpu.step_inputs import RING_TOKENS

NUM_BLOCKS = 1000
NUM_TOKENS = 300
NUM_ROWS = 8
NUM_SLOTS = 64


@dataclass(frozen=True, slots=True)
class AotCase:
    """`call` runs one op on meta tensors; it may launch several kernels."""

    name: str
    call: Callable[[], object]
    min_arch: int = 80


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int32(*shape: int) -> torch.Tensor:
    return _meta(*shape, dtype=torch.int32)


def _int64(*shape: int) -> torch.Tensor:
    return _meta(*shape, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a model."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    has_norm: bool = False
    num_decode_rows: int = 4

    @property
    def kv(self) -> KVBlocks:
        shape = (NUM_BLOCKS, self.num_kv_heads, self.block_size, self.head_dim)
        dtype = self.kv_dtype or self.dtype
        return KVBlocks(_meta(*shape, dtype=dtype), _meta(*shape, dtype=dtype))

    @property
    def name(self) -> str:
        parts = [f"d{self.head_dim}", f"{self.num_heads}:{self.num_kv_heads}", f"b{self.block_size}"]
        parts.append(str(self.kv_dtype or self.dtype).removeprefix("torch."))
        if self.window is not None:
            parts.append("window")
        if self.has_norm:
            parts.append("norm")
        if self.num_decode_rows > NUM_ROWS:
            parts.append(f"r{self.num_decode_rows}")
        return "-".join(parts)


def _attention(heads: Heads) -> None:
    num_rows = heads.num_decode_rows + NUM_ROWS // 2
    query = _meta(NUM_TOKENS, heads.num_heads, heads.head_dim, dtype=heads.dtype)
    batch = ForwardBatch(
        token_ids=_int64(NUM_TOKENS),
        positions=_int64(NUM_TOKENS),
        slot_mapping=_int64(NUM_TOKENS),
        block_tables=_int32(num_rows, 128),
        query_start=_int32(num_rows + 1),
        context_lens=_int32(num_rows),
        sample_indices=_int64(num_rows),
        num_decode_rows=heads.num_decode_rows,
    )
    paged_attention(query, heads.kv, batch, scale=0.1, window=heads.window)


def _store(heads: Heads) -> None:
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    table = _meta(4096, heads.head_dim // 2, dtype=torch.float32)
    weight = _meta(heads.head_dim, dtype=heads.dtype)
    store_kv(
        _meta(NUM_TOKENS, width, dtype=heads.dtype),
        _int64(NUM_TOKENS),
        _int64(NUM_TOKENS),
        Rotary(table, table),
        heads.kv,
        norm=HeadNorm(weight, weight, 1e-6) if heads.has_norm else None,
    )


def _sample(vocab_size: int, *, is_adjusted: bool) -> None:
    bias = penalties = allowed = None
    if is_adjusted:
        bias = Bias(_int32(NUM_ROWS + 1), _int32(99), _meta(99, dtype=torch.float32))
        histories = Histories(_int32(NUM_ROWS + 1), _int32(99), _int32(99))
        counts = SlotCounts(_int32(NUM_SLOTS, vocab_size), _int64(NUM_SLOTS))
        penalties = Penalties(_int32(NUM_ROWS), counts, histories)
        allowed = Allowed(_int32(NUM_ROWS), _int32(3, -(-vocab_size // 32)))
    inputs = SamplingInputs(
        parameters=_meta(NUM_ROWS, 6, dtype=torch.float64),
        top_ks=_int32(NUM_ROWS),
        seeds=_int64(NUM_ROWS),
        positions=_int64(NUM_ROWS),
        slots=_int32(NUM_ROWS),
        ring=_int32(NUM_SLOTS, RING_TOKENS),
        bias=bias,
        penalties=penalties,
        allowed=allowed,
    )
    sample(_meta(NUM_ROWS, vocab_size, dtype=torch.float32), inputs)


def _update_counts(vocab_size: int) -> None:
    """The common case: no row has a history."""
    counts = SlotCounts(_int32(NUM_SLOTS, vocab_size), _int64(NUM_SLOTS))
    update_counts(_int32(NUM_ROWS), _int64(NUM_ROWS), _int32(NUM_SLOTS, RING_TOKENS), counts, None)


def _embed(size: int, scale: float | None) -> None:
    ring = _int32(NUM_SLOTS, RING_TOKENS)
    embed_tokens(_int64(NUM_TOKENS), _int64(NUM_TOKENS), ring, _meta(32000, size), scale=scale)


def _rms_norm_branch(size: int) -> None:
    weight = _meta(size, dtype=torch.float32)
    x, residual = _meta(NUM_TOKENS, size), _meta(NUM_TOKENS, size)
    rms_norm(x, weight, 1e-6, residual=residual, branch_weight=weight)


def _rms_norm(size: int) -> None:
    rms_norm(_meta(NUM_TOKENS, size), _meta(size), 1e-6, residual=_meta(NUM_TOKENS, size))


def _silu_mul(size: int) -> None:
    silu_mul(_meta(NUM_TOKENS, 2 * size))


def _copy_blocks() -> None:
    copy_blocks(_meta(32, 2, NUM_BLOCKS, 8, 16, 128), _int32(4), _int32(4))


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ATTENTION = (
    Heads(64, 9, 3),
    Heads(80, 32, 32, block_size=32, dtype=torch.float16),
    Heads(96, 32, 32),
    Heads(128, 32, 8),
    Heads(128, 32, 8, block_size=64, dtype=torch.float16),
    Heads(128, 32, 8, window=4096),
    Heads(128, 64, 4),
    Heads(128, 32, 8, num_decode_rows=200),
    Heads(128, 32, 8, kv_dtype=E5M2),
    Heads(256, 8, 4),
    Heads(256, 4, 1, block_size=32, window=512),
)
STORE = (
    Heads(64, 9, 3),
    Heads(80, 32, 32, block_size=32, dtype=torch.float16),
    Heads(128, 32, 8),
    Heads(128, 32, 8, has_norm=True),
    Heads(256, 4, 1, has_norm=True),
)

CASES: tuple[AotCase, ...] = (
    *(AotCase(f"rms_norm-{size}", partial(_rms_norm, size)) for size in (576, 4096, 8192)),
    AotCase("rms_norm-2560-branch", partial(_rms_norm_branch, 2560)),
    AotCase("embed_tokens-4096", partial(_embed, 4096, None)),
    AotCase("embed_tokens-2560-scaled", partial(_embed, 2560, 50.5)),
    AotCase("silu_mul-14336", partial(_silu_mul, 14336)),
    AotCase("block_copy", _copy_blocks),
    *(AotCase(f"store_kv-{heads.name}", partial(_store, heads)) for heads in STORE),
    *(AotCase(f"attention-{heads.name}", partial(_attention, heads)) for heads in ATTENTION),
    # e4m3 needs sm_89.
    AotCase(
        f"attention-{Heads(128, 32, 8, kv_dtype=E4M3).name}",
        partial(_attention, Heads(128, 32, 8, kv_dtype=E4M3)),
        90,
    ),
    AotCase("token_counts-128256", partial(_update_counts, 128256)),
    AotCase("sampling-128256", partial(_sample, 128256, is_adjusted=False)),
    AotCase("sampling-128256-adjusted", partial(_sample, 128256, is_adjusted=True)),
)
