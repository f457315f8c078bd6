"""Memory of the process: large tensors on large pages, and what loading leaves behind."""

import ctypes
import mmap

import torch

_PAGE = 2 << 20


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages under memory that was not written yet; does nothing where there are none."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu":
        return
    first = -(-tensor.data_ptr() // _PAGE) * _PAGE
    last = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    if last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice))


def release_free_memory() -> None:
    """Give the allocator's free pages back to the system, where it has a call for that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
