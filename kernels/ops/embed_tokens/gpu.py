"""The embedding lookup on the GPU, for tokens that the host may not know yet: one program per piece of a row."""

# ruff: noqa: N803  compile-time parameters are upper case, as everywhere in Triton

import torch
import triton.language as tl

from kernels.ops.gpu.jit import kernel
from kernels.ops.gpu.tuning import launch_config


@kernel()
def _embed_tokens_kernel(
    token_ids: tl.tensor,
    positions: tl.tensor,
    ring: tl.tensor,
    embedding: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RING: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + token).to(tl.int64)
    is_pending = token_id < 0
    position = tl.load(positions + token)
    sampled = tl.load(ring + (-1 - token_id) * RING + position % RING, mask=is_pending, other=0).to(tl.int64)
    token_id = tl.where(is_pending, sampled, token_id)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    value = tl.load(embedding + token_id * SIZE + columns, mask=mask, other=0.0)
    if HAS_SCALE:
        value = (value.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token * SIZE + columns, value, mask=mask)


def embed_tokens(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    ring: torch.Tensor,
    embedding: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Return rows of `embedding` [vocab_size, hidden_size] times `scale`: [num_tokens, hidden_size], same float type.

    token_ids and positions are [num_tokens] int64.

    An id of -1 - slot is read from `ring` [num_slots, n] int32 at the slot and the token's position modulo n.
    """
    (num_tokens,) = token_ids.shape
    size = embedding.shape[1]
    assert embedding.is_contiguous()
    assert ring.is_contiguous()
    out = embedding.new_empty((num_tokens, size))
    config = launch_config("embed_tokens", "any", embedding.device)
    arguments = {
        "token_ids": token_ids,
        "positions": positions,
        "ring": ring,
        "embedding": embedding,
        "out": out,
        "scale": 1.0 if scale is None else scale,
        "SIZE": size,
        "BLOCK": config.block_n,
        "RING": ring.shape[1],
        "HAS_SCALE": scale is not None,
    }
    _embed_tokens_kernel.launch(
        (num_tokens, -(-size // config.block_n)), arguments, num_warps=config.num_warps
    )
    return out
