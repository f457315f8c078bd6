"""One layer's blocks, filled through the reference, for rows of given lengths."""

from dataclasses import dataclass

import torch

from kernels.ops.store_kv.reference import store_kv_reference


@dataclass(frozen=True)
class Layer:
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    """[num_rows, max_blocks] int32, scattered over the pool"""


def make_layer(lengths: list[int], num_kv_heads: int, head_dim: int, block_size: int) -> Layer:
    """Random K/V of each row; everything that no row owns is NaN, including the rest of a row's last block."""
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    needed = [-(-length // block_size) for length in lengths]
    ids = torch.randperm(sum(needed) + 2, generator=generator).int() + 1
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    shape = (len(ids) + 1, num_kv_heads)
    keys = torch.full((*shape, head_dim // 2, block_size, 2), torch.nan, dtype=torch.bfloat16)
    values = torch.full((*shape, block_size // 2, head_dim, 2), torch.nan, dtype=torch.bfloat16)
    first = 0
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        tables[row, :count] = ids[first : first + count]
        first += count
        at = torch.arange(length)
        slots = tables[row, at // block_size].long() * block_size + at % block_size
        if length % 2:
            # The kernel that stores a token zeroes its partner; see test_store_clears_the_partner.
            block, offset = divmod(int(slots[-1]), block_size)
            values[block, :, offset // 2] = 0
        key, value = torch.randn(2, length, num_kv_heads, head_dim, generator=generator)
        store_kv_reference(key, value, keys, values, slots)
    return Layer(keys, values, tables)
