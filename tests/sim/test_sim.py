"""The guarantees hold in some hundred schedules of faults, and the auditor notices every mechanism that is missing."""

import gc
import time
from collections.abc import Iterator

import pytest

from service.ingest.offsets import encode_completed
from tests.sim.__main__ import main
from tests.sim.controls import CONTROLS
from tests.sim.decoding import decode_map
from tests.sim.world import run_schedule

NUM_SCHEDULES = 150
FIRST_SEED = 1


@pytest.fixture(autouse=True, scope="module")
def _collect_seldom() -> Iterator[None]:
    """Every schedule leaves many small circles behind; looking for them all the time is slow."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.parametrize("part", range(3))
def test_schedules_keep_the_guarantees(part: int) -> None:
    first = FIRST_SEED + part * NUM_SCHEDULES // 3
    found = {seed: run_schedule(seed).violations for seed in range(first, first + NUM_SCHEDULES // 3)}
    gc.collect()
    assert {seed: violations for seed, violations in found.items() if violations} == {}


RED_WITHIN: dict[str, tuple[int, int]] = {
    "no_fence": (20, 50),
    "ignores_decided_record": (15, 30),
    "no_count_of_events": (4, 15),
    "ignores_cancel_key": (20, 60),
    "commits_the_newest": (1, 5),
    "map_lists_incomplete": (7, 10),
    "ignores_lost_partitions": (139, 100),
    "ends_before_the_result": (1, 5),
    "completes_before_the_result": (6, 10),
    "requests_stay": (16, 80),
    "superseded_runs_stay": (36, 80),
    "ends_twice": (14, 40),
}
"""Control to the first seed and the number of schedules within which it must be noticed. From seed 1 on it takes up to
about 150; the first seeds are chosen so that the tests are quick."""


@pytest.mark.parametrize("control", CONTROLS)
def test_control_without_the_mechanism_a_schedule_breaks_a_guarantee(control: str) -> None:
    first, count = RED_WITHIN[control]
    for seed in range(first, first + count):
        if run_schedule(seed, control=CONTROLS[control]).violations:
            return
    pytest.fail(f"{count} schedules without the mechanism and no violation")


def test_a_seed_gives_the_same_schedule_again() -> None:
    first, second = (run_schedule(7, traced=True) for _ in range(2))
    assert len(first.trace) > 20
    assert first.trace == second.trace
    assert (first.num_callbacks, first.ended_s) == (second.num_callbacks, second.ended_s)


def test_virtual_time_is_not_waited_for_and_the_clocks_come_back() -> None:
    clocks = (time.monotonic, time.time, time.perf_counter)
    started_s = time.perf_counter()
    outcome = run_schedule(3)  # some seconds
    assert outcome.ended_s > time.perf_counter() - started_s
    assert (time.monotonic, time.time, time.perf_counter) == clocks


def test_the_command_names_the_seeds_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "1", "--json"]) == 0
    assert '"violations": {}' in capsys.readouterr().out
    assert main(["--seed", "1", "--trace", "--control", "commits_the_newest"]) == 1
    captured = capsys.readouterr()
    assert "seed 1: G3" in captured.err
    assert "VIOLATION G3" in captured.out


def test_the_auditor_reads_the_map_of_a_commit() -> None:
    ranges = [(101, 104), (300, 301), (1000, 70_000)]
    assert list(decode_map(100, encode_completed(100, ranges))) == ranges
    assert list(decode_map(100, "")) == []
