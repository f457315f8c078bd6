"""The paged key/value memory of a model, in the layout that the CPU's attention reads."""

from collections.abc import Sequence

import torch

from kernels.memory import use_huge_pages
from kernels.model_config import ModelConfig


def lane_width(dtype: torch.dtype) -> int:
    """Return the number of values in a 32-bit lane: dot-product instructions multiply two-byte types in pairs."""
    return 4 // dtype.itemsize


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block in bytes, over all layers, keys and values together."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_size * dtype.itemsize


class KVPool:
    """Blocks of keys and values, addressed by (layer, block id).

    With `pack = lane_width(dtype)`:
    keys   [num_layers, num_blocks, num_kv_heads, head_dim / pack, block_size, pack]
    values [num_layers, num_blocks, num_kv_heads, block_size / pack, head_dim, pack]
    so that each block is already laid out as the right-hand matrix of q·kᵀ and of p·v.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ValueError unless num_blocks > 0 and 16 divides block_size and 2 * pack divides head_dim."""
        pack = lane_width(dtype)
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; at least 1 is needed")
        if block_size < 1 or block_size % 16:
            raise ValueError(f"block_size is {block_size}; it must be a multiple of 16")
        if config.head_dim % (2 * pack):
            raise ValueError(f"head_dim is {config.head_dim}; it must be a multiple of {2 * pack}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.pack = pack
        shape = (config.num_layers, num_blocks, config.num_kv_heads)
        head_dim = config.head_dim
        self.keys = _zeros((*shape, head_dim // pack, block_size, pack), dtype, device)
        self.values = _zeros((*shape, block_size // pack, head_dim, pack), dtype, device)

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers, (source, destination); destinations must be distinct from sources."""
        if not pairs:
            return
        source, destination = torch.tensor(pairs, device=self.keys.device).unbind(1)
        self.keys[:, destination] = self.keys[:, source]
        self.values[:, destination] = self.values[:, source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    # One head's block fills a 4 KiB page, so attention would need a TLB entry for each.
    tensor = torch.empty(shape, dtype=dtype, device=device)
    use_huge_pages(tensor)
    return tensor.zero_()
