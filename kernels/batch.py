"""What the model's forward pass takes: one flat batch of tokens and where each belongs."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of the plan laid end to end. All index tensors are int32 or int64 on the model's device.

    Decoding rows (one token) come first; `num_decode_rows` of them.
    """

    token_ids: torch.Tensor
    """[num_tokens] int64"""
    positions: torch.Tensor
    """[num_tokens] int64: absolute position in its request"""
    slot_mapping: torch.Tensor
    """[num_tokens] int64: block_id * block_size + offset, where each token's K/V is written"""
    block_tables: torch.Tensor
    """[num_rows, max_blocks] int32; entries past a row's length are 0 and never read"""
    query_start: torch.Tensor
    """[num_rows + 1] int32: row i's tokens are token_ids[query_start[i]:query_start[i + 1]]"""
    context_lens: torch.Tensor
    """[num_rows] int32: tokens visible to a row's last token, itself included"""
    sample_indices: torch.Tensor
    """[num_sampled] int64: flat indices whose logits are wanted, in row order"""
    num_decode_rows: int
