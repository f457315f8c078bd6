"""Level 2 of ops/decisions/0009-determinism.md with Gemma 3 270M: windows by layer, rows longer than they are."""

import pytest

from tests.kernels.determinism import Circumstances, Load, load, serve
from tests.kernels.needs import needs_compiled_path, real_model

MODEL = "gemma3-270m"
LOAD = Load(
    [
        [2, *((1009 * number + 37 * place) % 90_000 for place in range(length - 1))]
        for number, length in enumerate((3, 140, 900))
    ],
    max_tokens=3,
)
"""The last one exceeds the window of 512 and the 512 keys of a span, so its layers share out different spans."""

pytestmark = [pytest.mark.model, needs_compiled_path]


@pytest.fixture(scope="module", autouse=True)
def _needs_the_model() -> None:
    real_model(MODEL)


@pytest.mark.parametrize("quantization", [pytest.param("none", marks=pytest.mark.slow), "int8"])
def test_neighbours_and_chunks_leave_every_bit(quantization: str) -> None:
    whole, cut = Circumstances(num_threads=2), Circumstances(chunk_tokens=100)
    runner = load(MODEL, whole, quantization=quantization)

    together = serve(runner, LOAD, cut)

    for number in range(len(LOAD.prompts)):
        alone = serve(runner, LOAD, whole, [number])
        for place, line in alone.logits.items():
            assert together.logits[place] == line, place
