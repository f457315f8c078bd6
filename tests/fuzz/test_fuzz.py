"""A little fuzzing of every target in each run of the tests; `python -m tests.fuzz` does it at length."""

import os

import pytest

from tests.fuzz.controls import CONTROLS
from tests.fuzz.run import run
from tests.fuzz.target import Outcome, Target
from tests.fuzz.targets import TARGETS

NUM_INPUTS = 400
"""For a share of 1."""
NUM_CONTROL_INPUTS = 4_000
ALWAYS_ACCEPTED = {"handover", "detokenizer"}


def inputs_of(name: str, seed: int) -> range:
    return range(seed, seed + round(NUM_INPUTS * min(1.0, TARGETS[name].share)))


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_parsed_correctly_or_refused_cleanly(name: str) -> None:
    """Always the same inputs, so that a failure is the change's."""
    report = run(TARGETS[name], inputs_of(name, seed=0))
    assert not report.faults, str(report.faults[0])
    assert report.outcomes[Outcome.ACCEPTED] > 0
    assert report.outcomes[Outcome.REFUSED] > 0 or name in ALWAYS_ACCEPTED


@pytest.mark.parametrize("name", TARGETS)
def test_control_a_check_that_is_taken_out_is_missed(name: str) -> None:
    for seed in range(0, NUM_CONTROL_INPUTS, 100):
        if run(CONTROLS[name], range(seed, seed + 100)).faults:
            return
    pytest.fail(f"{CONTROLS[name]} passes")


def test_the_same_seed_makes_the_same_input() -> None:
    for name, target in TARGETS.items():
        first, second = (run(_Broken(target), range(7, 8)).faults[0] for _ in range(2))
        assert first == second, name
        assert f"--target {name} --seed 7 --inputs 1" in str(first)


class _Broken(Target):
    """Fails on every input, so that its report shows them."""

    def __init__(self, target: Target) -> None:
        self.__dict__.update(name=target.name, make=target.make)

    def check(self, case: object) -> Outcome:
        raise AssertionError("as always")


@pytest.mark.skipif(os.environ.get("CI") == "true", reason="CI looks at the same inputs every time")
def test_new_inputs_each_time() -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    for name in TARGETS:
        report = run(TARGETS[name], range(seed, seed + 20))
        assert not report.faults, str(report.faults[0])
