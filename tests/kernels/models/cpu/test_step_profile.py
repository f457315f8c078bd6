"""The names and floors of a step's parts in ops.bench.step_parts."""

import pytest

from kernels.models.cpu.fused_step import PHASES_PER_LAYER
from ops.bench.step_parts import LAYER_PHASES, keys_of_step, phase_names
from tests.kernels.models.cpu.test_fused import make_batch


def test_every_phase_has_a_name() -> None:
    assert len(LAYER_PHASES) == PHASES_PER_LAYER
    assert len(phase_names(3)) == 1 + 3 * PHASES_PER_LAYER + 2


@pytest.mark.parametrize("window", [0, 1, 5, 12, 100])
def test_keys_are_counted_token_by_token(window: int) -> None:
    rows = [((1,), 3, 1), ((2, 9, 4), 0, 37), ((7, 3), 11, 6)]
    read = seen = 0
    for _, before, count in rows:
        views = [
            range(max(0, at - window + 1) if window else 0, at + 1) for at in range(before, before + count)
        ]
        read += len(set().union(*views))
        seen += sum(len(view) for view in views)

    assert keys_of_step([window], make_batch(rows)) == (read, seen)
    assert keys_of_step([window, window], make_batch(rows)) == (2 * read, 2 * seen)
