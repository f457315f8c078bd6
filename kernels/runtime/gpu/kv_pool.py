"""The paged key/value memory in the layout that the GPU's kernels read."""

from collections.abc import Sequence

import torch

from kernels.model_config import ModelConfig
from kernels.ops.block_copy.gpu import copy_blocks
from kernels.ops.store_kv.gpu import KVBlocks
from kernels.runtime.gpu.copies import copies_of
from kernels.runtime.gpu.upload import Staging


class GpuKVPool:
    """Blocks of keys and values, addressed by (layer, block id), in one allocation.

    blocks [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]: a head's tokens are contiguous, so
    that a tile of K or V is read in whole rows of head_dim.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
    ) -> None:
        """Raises ValueError unless num_blocks > 0, block_size is a multiple of 16 and head_dim even and at most 256."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; at least 1 is needed")
        if block_size < 1 or block_size % 16:
            raise ValueError(f"block_size is {block_size}; it must be a multiple of 16")
        if config.head_dim % 2 or config.head_dim > 256:
            raise ValueError(f"head_dim is {config.head_dim}; it must be even and at most 256")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        self._staging = Staging(self.blocks.device, copies_of(self.blocks.device))

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def layer(self, layer_idx: int) -> KVBlocks:
        return KVBlocks(self.blocks[layer_idx, 0], self.blocks[layer_idx, 1])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers, (source, destination); destinations must be distinct from sources.

        This does not wait for the device. It needs its own upload, because it runs before the step's.
        """
        if not pairs:
            return
        source, target = torch.tensor(pairs, dtype=torch.int32).unbind(1)
        on_device = self._staging.upload({"source": source, "target": target})
        copy_blocks(self.blocks, on_device["source"], on_device["target"])
