"""The counter RNG against the known answers of its authors' Random123 distribution, and its basic statistics."""

import numpy as np
import pytest

from kernels.sampling.cpu.draw import philox_4x32, uniform

KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox_4x32(
        [np.array([word], dtype=np.uint64) for word in counter],
        [np.array([word], dtype=np.uint64) for word in key],
    )

    assert tuple(int(word[0]) for word in words) == expected


def test_uniform_takes_the_upper_53_bits_of_the_first_two_words() -> None:
    word = ((0x6627E8D5 << 32) | 0xE169C58D) >> 11

    assert uniform([0], [0])[0] == word / 2**53


def test_a_number_depends_on_its_own_seed_and_position_only() -> None:
    together = uniform([1, 2, 2**64 - 1, -1], [5, 6, 7, 7])

    assert together[0] == uniform([1], [5])[0]
    assert together[1] == uniform([2], [6])[0]
    assert together[2] == together[3] == uniform([2**64 - 1], [7])[0]


def test_seed_and_position_use_all_their_bits() -> None:
    seeds = [1 << bit for bit in range(64)]
    positions = [1 << bit for bit in range(63)]

    numbers = [*uniform(seeds, [0] * 64), *uniform([0] * 63, positions)]

    assert len(set(numbers)) == 127


def test_numbers_are_even_and_uncorrelated_along_positions() -> None:
    numbers = uniform([42] * 20_000, range(20_000))

    counts = np.histogram(numbers, bins=20, range=(0.0, 1.0))[0]
    chi_square = ((counts - 1000.0) ** 2 / 1000.0).sum()
    assert chi_square < 43.8  # 99.9th percentile at 19 degrees of freedom
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.025
    assert 0.0 <= numbers.min() < numbers.max() < 1.0
