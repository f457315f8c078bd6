"""How the threads of one parallel region share a step: each takes the next numbered tile of a phase until none is left.

A phase ends when its tiles are done, not when all threads have arrived. A thread that starts late, or never, delays no
other thread: no barrier can deadlock, and a thread whose core is busy with something else only takes fewer tiles.
Counters are int64, two per phase, each on a cache line of its own, zero when the region starts.
"""

from kernels.ops.cpu.intrinsics import cycles, fetch_add, i64, load_acquire, pause
from kernels.ops.cpu.jit import jit_inline, types

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
