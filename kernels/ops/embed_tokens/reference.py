import torch


def embed_tokens_reference(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    ring: torch.Tensor,
    embedding: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the rows of `embedding` [vocab_size, hidden_size], any float type, for token_ids [num_tokens] int64.

    An id of -1 - slot stands for the token that `ring` [num_slots, n] int32 has for the slot and the position modulo n.
    """
    pending = token_ids < 0
    known = token_ids.clone()
    known[pending] = ring[-1 - token_ids[pending], positions[pending] % ring.shape[1]].long()
    lines = embedding[known]
    return lines if scale is None else (lines.float() * scale).to(lines.dtype)
