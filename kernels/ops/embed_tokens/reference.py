import torch


def embed_tokens_reference(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    ring: torch.Tensor,
    embedding: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Lines of `embedding`; an id of -1 - seat stands for what `ring` has of that seat at the token's position."""
    pending = token_ids < 0
    known = token_ids.clone()
    known[pending] = ring[-1 - token_ids[pending], positions[pending] % ring.shape[1]].long()
    lines = embedding[known]
    return lines if scale is None else (lines.float() * scale).to(lines.dtype)
