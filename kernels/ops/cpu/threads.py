"""Running one unit on several threads: those of the OpenMP library that torch itself runs on.

With a pool of our own, idle threads of either pool would spin on the cores that the other needs.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.ops.cpu.jit import Unit


def run_on_threads(unit: Unit, argument: int, num_threads: int) -> None:
    """Call the one-argument unit on `num_threads` threads at once, this one included; the GIL is released.

    Fewer threads may turn up: units share their work so that this only costs time.
    """
    parallel = _gomp_parallel()
    if parallel is None or num_threads == 1:
        unit(argument)
    else:
        parallel(unit.address, argument, num_threads, 0)


@cache
def _gomp_parallel() -> Any:
    """GCC's entry point for a parallel region (LLVM's and Intel's OpenMP have it too), None where torch has none."""
    try:
        # Asked for through torch's own library: another OpenMP may be loaded beside it.
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function
