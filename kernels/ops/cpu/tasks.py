"""How the threads of one parallel region share a step: each takes the next numbered tile of a phase until none is left.

A phase ends when its tiles are done, not when all threads have arrived. A thread that starts late, or never, delays no
other thread: no barrier can deadlock, and a thread whose core is busy with something else only takes fewer tiles.
Counters are int64, two per phase, each on a cache line of its own, zero when the region starts.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.ops.cpu.intrinsics import cycles, fetch_add, i64, load_acquire, pause
from kernels.ops.cpu.jit import CompiledFunction, jit_inline, types

PHASE_BYTES = 128
START_STAMP, END_STAMP = 16, 8
"""Offsets of time stamps within a phase: the region's start in the first phase, each phase's end in its own."""
_SPINS_BEFORE_YIELD = 4000

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@jit_inline
def next_tile(phase: int) -> int:
    """The index of this phase's next tile; none is left once it reaches the number of tiles."""
    number: int = fetch_add(phase, 1)
    return number


@jit_inline
def done(phase: int, num_tiles: int) -> None:
    if fetch_add(phase + 64, 1) + 1 == num_tiles:
        i64(phase + END_STAMP)[0] = cycles()


@jit_inline
def wait(phase: int, num_tiles: int) -> None:
    """Return when all tiles are done; what they wrote is then visible."""
    spins = 0
    while load_acquire(phase + 64) < num_tiles:
        pause()
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _sched_yield()


def run_on_threads(function: CompiledFunction, argument: int, num_threads: int) -> None:
    """Call the one-argument function on `num_threads` threads at once, this one included; the GIL is released.

    Fewer threads may run: the work is shared so that this only costs time. The threads are those of the OpenMP
    library that torch runs on: idle threads of a pool of our own would spin on the cores that torch needs.
    """
    parallel = _gomp_parallel()
    if parallel is None or num_threads == 1:
        function(argument)
    else:
        parallel(function.address, argument, num_threads, 0)


@cache
def _gomp_parallel() -> Any:
    """GCC's entry point for a parallel region (LLVM's and Intel's OpenMP have it too), None if torch has none."""
    try:
        # The symbol is looked up through torch's own library, because another OpenMP may be loaded as well.
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function
