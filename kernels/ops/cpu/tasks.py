"""How the threads of one parallel region share a step: by drawing numbered tiles of each phase in turn.

A phase ends when its tiles are done, not when all threads have arrived: a thread that starts late, or never, delays
nobody, so no barrier can deadlock and a core busy with something else only draws fewer tiles.
Counters are int64, two per phase, each on a cache line of its own, zero when the region starts.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.ops.cpu.intrinsics import cycles, fetch_add, i64, load_acquire, pause
from kernels.ops.cpu.jit import Unit, device, types

PHASE_BYTES = 128
START_STAMP, END_STAMP = 16, 8
"""Where time stamps lie within a phase: the region's start in the first one, each phase's end in its own."""
_SPINS_BEFORE_YIELD = 4000

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@device
def draw(phase: int) -> int:
    """The next tile of this phase; at or past its number of tiles there is none left."""
    number: int = fetch_add(phase, 1)
    return number


@device
def done(phase: int, num_tiles: int) -> None:
    if fetch_add(phase + 64, 1) + 1 == num_tiles:
        i64(phase + END_STAMP)[0] = cycles()


@device
def wait(phase: int, num_tiles: int) -> None:
    """Return when all tiles are done; what they wrote is then visible."""
    spins = 0
    while load_acquire(phase + 64) < num_tiles:
        pause()
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _sched_yield()


def run_on_threads(unit: Unit, argument: int, num_threads: int) -> None:
    """Call the one-argument unit on `num_threads` threads at once, this one included; the GIL is released.

    Fewer threads may turn up: the work is shared so that this only costs time. The threads are those of the OpenMP
    library that torch runs on: idle threads of a pool of our own would spin on the cores that torch needs.
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
