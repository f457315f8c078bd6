"""Level 2 of ops/decisions/0009-determinism.md with the default model, including restarts."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.determinism import Circumstances, Load, Served, load, serve
from tests.kernels.needs import needs_compiled_path, real_model

MODEL = "smollm2-135m-instruct"
ROOT = Path(__file__).resolve().parents[2]
SHARED = tuple((37 * place) % 49_000 for place in range(48))
LOAD = Load(
    [
        # Every other request shares its beginning with others.
        [
            *SHARED[: 48 * (number % 2)],
            *((1009 * number + 37 * place) % 49_000 for place in range(3 + 8 * (number % 16))),
        ]
        for number in range(32)
    ],
    max_tokens=18,  # every request needs a further block at some point
)
LOOKED_AT = (0, 7, 15, 30)
"""Requests that are also run alone; one of them crosses a segment of 128 keys."""

pytestmark = [pytest.mark.model, needs_compiled_path]


@pytest.fixture(scope="module", autouse=True)
def _needs_the_model() -> None:
    real_model(MODEL)


def digest(served: Served, numbers: tuple[int, ...] = LOOKED_AT) -> str:
    """A hash of all logits of these requests, in order."""
    lines = sorted((place, line) for place, line in served.logits.items() if place[0] in numbers)
    assert lines
    return hashlib.sha256(
        repr([place for place, _ in lines]).encode() + b"".join(line for _, line in lines)
    ).hexdigest()


@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=pytest.mark.slow)])
def test_neighbours_chunks_preemption_and_prefix_hits_leave_every_bit(quantization: str) -> None:
    roomy = load(MODEL, Circumstances(), quantization=quantization)
    tight = Circumstances(chunk_tokens=100, num_blocks=40, num_threads=2, prefix_caching=True)
    runner = load(MODEL, tight, quantization=quantization)

    together = serve(roomy, LOAD, Circumstances())
    squeezed = serve(runner, LOAD, tight)

    assert squeezed.stats.num_preemptions > 0
    assert squeezed.stats.prefix_hit_tokens > 0
    for number in LOOKED_AT:
        alone = serve(roomy, LOAD, Circumstances(), [number])
        expected = digest(alone, (number,))
        assert digest(together, (number,)) == digest(squeezed, (number,)) == expected
        assert alone.tokens[number] == together.tokens[number] == squeezed.tokens[number]


def test_restarts_with_other_threads_and_other_batches_leave_every_bit() -> None:
    hashes = set()
    for num_threads, chunk_tokens in ((1, 512), (2, 70)):
        ended = subprocess.run(
            [sys.executable, "-m", "tests.kernels.test_determinism_smollm2", str(num_threads), str(chunk_tokens)],
            env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=240,
        )  # fmt: skip
        hashes.add(ended.stdout.strip())
    assert len(hashes) == 1
    assert len(hashes.pop()) == 64


if __name__ == "__main__":
    circumstances = Circumstances(num_threads=int(sys.argv[1]), chunk_tokens=int(sys.argv[2]))
    print(digest(serve(load(MODEL, circumstances), LOAD, circumstances, LOOKED_AT)))
