"""A counter-based random generator: the number is a function of (seed, position), with no state to lose.

Philox-4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_NUM_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox_4x32(counter: Sequence[U64], key: Sequence[U64]) -> tuple[U64, U64, U64, U64]:
    """Four random 32-bit words for each column of counter (4 arrays) and key (2 arrays) of 32-bit words.

    All are held as uint64 so that products keep their upper halves.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _32) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1) with 53 random bits; seeds are taken modulo 2**64."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(counter)
    high, low, _, _ = philox_4x32((counter & _LOW, counter >> _32, zero, zero), (key & _LOW, key >> _32))
    bits = ((high << _32) | low) >> np.uint64(11)
    return np.asarray(bits.astype(np.float64) * 2.0**-53)
