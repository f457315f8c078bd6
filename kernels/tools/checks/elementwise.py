"""embed_tokens, rms_norm and silu_mul."""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it

from kernels.ops.embed_tokens.gpu import embed_tokens
from kernels.ops.embed_tokens.reference import embed_tokens_reference
from kernels.ops.rms_norm.gpu import rms_norm
from kernels.ops.rms_norm.reference import rms_norm_reference
from kernels.ops.silu_mul.gpu import silu_mul
from kernels.ops.silu_mul.reference import silu_mul_reference
from kernels.tools.checks.case import Check, assert_near, generator, poisoned_outputs

EPS = 1e-6


def _norm(device: torch.device, *, size: int, dtype: torch.dtype, has_residual: bool) -> None:
    random = generator(size)
    # Rows of a wider tensor: the stride is not the size.
    x = torch.randn(3, size + 5, generator=random).to(device, dtype)[:, :size]
    weight = torch.randn(size, generator=random).to(device, dtype)
    residual = torch.randn(3, size, generator=random).to(device, dtype) if has_residual else None
    summed = x if residual is None else (x.float() + residual.float()).to(dtype)
    expected = rms_norm_reference(summed, weight.float(), EPS)
    with poisoned_outputs():
        actual = rms_norm(x, weight, EPS, residual=residual)
    assert_near(actual, expected, "rms_norm")
    if residual is not None:
        assert_near(residual, summed, "residual")


def _sandwich(device: torch.device, *, size: int, dtype: torch.dtype) -> None:
    """A branch that is normalized before it is added, as in Gemma 3, with weights wider than the rest."""
    random = generator(size)
    x, residual = (torch.randn(3, size, generator=random).to(device, dtype) for _ in range(2))
    weight, branch_weight = (torch.randn(size, generator=random).to(device) for _ in range(2))
    branch = rms_norm_reference(x.float(), branch_weight, EPS).to(dtype)
    summed = (residual.float() + branch.float()).to(dtype)
    expected = rms_norm_reference(summed.float(), weight, EPS)
    with poisoned_outputs():
        actual = rms_norm(x, weight, EPS, residual=residual, branch_weight=branch_weight)
    assert_near(actual, expected, "rms_norm")
    assert_near(residual, summed, "residual")


def _embed(device: torch.device, *, size: int, dtype: torch.dtype, scale: float | None) -> None:
    """Known tokens, including the vocabulary's first and last, and pending ones at each index of the ring."""
    random = generator(size)
    embedding = torch.randn(70, size, generator=random).to(device, dtype)
    ring = torch.randint(0, 70, (6, 4), dtype=torch.int32, generator=random).to(device)
    token_ids = torch.tensor([0, -1, 69, -6, -3, -3, 7], device=device)
    positions = torch.tensor([5, 8, 1 << 33, 9, 2, 1_000_003, 0], device=device)
    expected = embed_tokens_reference(token_ids, positions, ring, embedding, scale)
    with poisoned_outputs():
        actual = embed_tokens(token_ids, positions, ring, embedding, scale=scale)
    assert torch.equal(actual, expected), "embed_tokens"


def _gate(device: torch.device, *, size: int, dtype: torch.dtype, gelu_tanh: bool) -> None:
    gate_up = (3 * torch.randn(3, 2 * size, generator=generator(size))).to(device, dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = F.gelu(gate, approximate="tanh") * up if gelu_tanh else silu_mul_reference(gate_up.float())
    with poisoned_outputs():
        actual = silu_mul(gate_up, gelu_tanh=gelu_tanh)
    assert_near(actual, expected, "silu_mul")


CASES = (
    *(
        Check(
            f"embed_tokens-{size}-{dtype}-{'plain' if scale is None else 'scaled'}",
            ("embed_tokens",),
            partial(_embed, size=size, dtype=dtype, scale=scale),
        )
        for size, dtype, scale in (
            (64, torch.float32, None),
            (1100, torch.bfloat16, 25.25),
            (577, torch.float16, None),
        )
    ),
    *(
        Check(
            f"rms_norm-{size}-{dtype}-branch",
            ("rms_norm",),
            partial(_sandwich, size=size, dtype=dtype),
        )
        for size, dtype in ((640, torch.bfloat16), (72, torch.float32))
    ),
    *(
        Check(
            f"rms_norm-{size}-{dtype}-{'residual' if has_residual else 'plain'}",
            ("rms_norm",),
            partial(_norm, size=size, dtype=dtype, has_residual=has_residual),
        )
        for size, dtype, has_residual in (
            (64, torch.float32, False),
            (577, torch.bfloat16, True),
            (1024, torch.float16, True),
            (4096, torch.float32, True),
            (5120, torch.bfloat16, False),
        )
    ),
    *(
        Check(
            f"silu_mul-{size}-{dtype}-{'gelu' if gelu else 'silu'}",
            ("silu_mul",),
            partial(_gate, size=size, dtype=dtype, gelu_tanh=gelu),
        )
        for size, dtype, gelu in (
            (1, torch.float32, False),
            (1536, torch.bfloat16, False),
            (1025, torch.float16, False),
            (1000, torch.float32, True),
        )
    ),
)
