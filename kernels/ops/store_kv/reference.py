import torch


def store_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] into one layer's blocks (KVPool's layout and dtype)."""
    _, _, lanes, block_size, pack = key_blocks.shape
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    pairs = key.to(key_blocks.dtype).reshape(*key.shape[:2], lanes, pack)
    key_blocks[block, :, :, offset, :] = pairs
    value_blocks[block, :, offset // pack, :, offset % pack] = value.to(value_blocks.dtype)
