"""Memory for packed weights: long runs on large pages, in the order in which a step reads them."""

import torch

from kernels.memory import fresh_memory

_SLAB_BYTES = 64 << 20
_ALIGNMENT = 64


class Arena:
    """Hands out tensors side by side. One of a matrix's own would be too short for a large page, and a stream of reads
    that misses the translation cache every 4 KiB does not reach the memory's bandwidth.
    """

    def __init__(self, slab_bytes: int = _SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that is not written yet, 64-byte aligned; it keeps its slab alive."""
        num_bytes = shape.numel() * dtype.itemsize
        if self._used + num_bytes > self._slab.nbytes:
            self._slab = fresh_memory(max(num_bytes, self._slab_bytes))
            self._used = 0
        tensor = self._slab[self._used : self._used + num_bytes].view(dtype).view(shape)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor
