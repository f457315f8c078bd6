import torch


def gather_kv(
    key_blocks: torch.Tensor, value_blocks: torch.Tensor, block_table: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy one row's keys and values [num_kv_heads, num_tokens, head_dim] out of its blocks in order, same type."""
    num_blocks = -(-num_tokens // key_blocks.shape[3])
    table = block_table[:num_blocks].long()
    key = key_blocks[table].permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)
    value = value_blocks[table].permute(1, 0, 2, 4, 3).flatten(1, 3)
    return key[:, :num_tokens], value[:, :num_tokens]


def visible(num_queries: int, context_len: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return bool [num_queries, context_len]: True where a query sees a key; the last query is at context_len - 1."""
    query = torch.arange(context_len - num_queries, context_len, device=device).unsqueeze(1)
    key = torch.arange(context_len, device=device).unsqueeze(0)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def paged_attention_reference(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of query [num_tokens, num_heads, head_dim], row by row over gathered K/V, in float32."""
    output = torch.empty_like(query)
    num_heads, num_kv_heads = query.shape[1], key_blocks.shape[1]
    bounds = query_start.tolist()
    for row, context_len in enumerate(context_lens.tolist()):
        key, value = gather_kv(key_blocks, value_blocks, block_tables[row], context_len)
        key, value = (kv.float().repeat_interleave(num_heads // num_kv_heads, 0) for kv in (key, value))
        q = query[bounds[row] : bounds[row + 1]].transpose(0, 1).float()
        scores = q @ key.transpose(1, 2) * scale
        mask = visible(q.shape[1], context_len, window, query.device)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        output[bounds[row] : bounds[row + 1]] = (weights @ value).transpose(0, 1).to(query.dtype)
    return output
