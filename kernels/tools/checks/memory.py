"""store_kv with rotary, and block copies."""

from dataclasses import dataclass
from functools import partial

import torch

from kernels.ops.block_copy.gpu import copy_blocks
from kernels.ops.rms_norm.reference import rms_norm_reference
from kernels.ops.rotary.reference import rotary_reference
from kernels.ops.store_kv.gpu import HeadNorm, KVBlocks, Rotary, store_kv
from kernels.tools.checks.case import Check, assert_near, generator, poisoned_outputs

EPS = 1e-6
NUM_BLOCKS = 5


@dataclass(frozen=True, slots=True)
class StoreCase:
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    dtype: torch.dtype
    has_norm: bool = False
    kv_dtype: torch.dtype | None = None


def check_store_kv(device: torch.device, case: StoreCase) -> None:
    """slot_mapping at block edges, out of order and absent; all other memory must keep its bytes."""
    random = generator(case.head_dim)
    slots = [2 * case.block_size + 1, NUM_BLOCKS * case.block_size - 1, 0, -1, case.block_size - 1]
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = torch.randn(len(slots), width, generator=random).to(device, case.dtype)
    angles = torch.randn(64, case.head_dim // 2, generator=random).to(device)
    positions = torch.tensor([0, 3, 63, 7, 9], device=device)
    weights = torch.randn(2, case.head_dim, generator=random).to(device, case.dtype)
    shape = (NUM_BLOCKS, case.num_kv_heads, case.block_size, case.head_dim)
    kv_dtype = case.kv_dtype or case.dtype
    key_pool, value_pool = (torch.full(shape, 7.0, device=device).to(kv_dtype) for _ in range(2))
    scales = (0.5, 2.0) if case.kv_dtype is not None else (1.0, 1.0)
    kv = KVBlocks(key_pool, value_pool, *scales)

    heads = qkv.view(len(slots), -1, case.head_dim).float()
    query, key, value = torch.split(heads, [case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    norm = HeadNorm(weights[0], weights[1], EPS) if case.has_norm else None
    if norm is not None:
        query = rms_norm_reference(query, norm.query.float(), EPS)
        key = rms_norm_reference(key, norm.key.float(), EPS)
    cos, sin = angles.cos(), angles.sin()
    query, key = (rotary_reference(x, cos[positions], sin[positions]) for x in (query, key))

    with poisoned_outputs():
        actual = store_kv(qkv, positions, torch.tensor(slots, device=device), Rotary(cos, sin), kv, norm=norm)
    assert_near(actual, query, "query")
    for name, stored, wanted, scale in (
        ("key", kv.key, key, kv.key_scale),
        ("value", kv.value, value, kv.value_scale),
    ):
        expected = torch.full(shape, 7.0, device=device).to(kv_dtype).float()
        for token, slot in enumerate(slots):
            if slot >= 0:
                scaled = (wanted[token] / scale).to(kv_dtype).float()
                expected[slot // case.block_size, :, slot % case.block_size] = scaled
        _assert_stored(stored, expected, name)


def _assert_stored(stored: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if stored.dtype.itemsize > 1:
        assert_near(stored, expected, what)
        return
    # fp8 has two or three bits of mantissa: results may differ by one step.
    step = 0.3 if stored.dtype == torch.float8_e5m2 else 0.15
    torch.testing.assert_close(stored.float().cpu(), expected.cpu(), rtol=step, atol=0.02)


def check_copies(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Copy on write within a pool, bit for bit."""
    pool = torch.randn(2, 2, 6, 3, 16, head_dim, generator=generator(1)).to(device, dtype)
    expected = pool.clone()
    expected[:, :, [4, 0]] = pool[:, :, [1, 5]]
    ids = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([1, 5], [4, 0])]
    copy_blocks(pool, ids[0], ids[1])
    assert torch.equal(pool, expected), "copy_blocks"


STORE_CASES = (
    StoreCase(64, 9, 3, 16, torch.bfloat16),
    StoreCase(80, 4, 4, 32, torch.float16),
    StoreCase(96, 6, 2, 64, torch.float32),
    StoreCase(128, 8, 1, 16, torch.bfloat16, has_norm=True),
    StoreCase(256, 4, 2, 32, torch.float32, has_norm=True),
    StoreCase(64, 4, 2, 16, torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
    StoreCase(128, 2, 2, 16, torch.float16, kv_dtype=torch.float8_e5m2),
)

CASES = (
    *(
        Check(
            f"store_kv-d{case.head_dim}-{case.num_heads}:{case.num_kv_heads}-b{case.block_size}-"
            f"{case.kv_dtype or case.dtype}{'-norm' if case.has_norm else ''}",
            ("store_kv",),
            partial(check_store_kv, case=case),
        )
        for case in STORE_CASES
    ),
    Check("block_copy-bf16", ("block_copy",), partial(check_copies, dtype=torch.bfloat16, head_dim=80)),
    Check("block_copy-fp32", ("block_copy",), partial(check_copies, dtype=torch.float32, head_dim=64)),
)
