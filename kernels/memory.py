"""Memory of the process: large tensors on large pages, packed weights side by side, and the release of free pages."""

import ctypes
import mmap

import torch

_PAGE = 2 << 20
_SLAB_BYTES = 64 << 20
_ALIGNMENT = 64


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages for a tensor [...] of any type that was not written yet; without them it does nothing."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu":
        return
    first = -(-tensor.data_ptr() // _PAGE) * _PAGE
    last = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    if last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice))


def fresh_memory(num_bytes: int) -> torch.Tensor:
    """Return zeroed uint8 [num_bytes] that the allocator has not used before, on large pages where there are any.

    Memory that the allocator reuses keeps the pages it had, so madvise would come too late.
    """
    memory = mmap.mmap(-1, num_bytes + _PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _PAGE
    return whole[first : first + num_bytes]


class Arena:
    """Allocates tensors side by side, in the order in which a step reads them.

    A single matrix is often shorter than a large page, and reads that miss the TLB every 4 KiB do not reach the
    memory's bandwidth.
    """

    def __init__(self, slab_bytes: int = _SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return an unwritten tensor [*shape] of `dtype`, 64-byte aligned; it keeps its slab alive."""
        num_bytes = shape.numel() * dtype.itemsize
        if self._used + num_bytes > self._slab.nbytes:
            self._slab = fresh_memory(max(num_bytes, self._slab_bytes))
            self._used = 0
        tensor = self._slab[self._used : self._used + num_bytes].view(dtype).view(shape)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor


def release_free_memory() -> None:
    """Give the allocator's free pages back to the system, if it has a call for that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
