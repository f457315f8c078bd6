"""Times of a delivery: what counts from the record's stamp, and what a record without one means."""

import pytest

from service.ingest.delivery import Delivery
from service.worker.job_run import JobRun

WALL_S = 1_900_000_000.0


def run_of(timestamp_ms: int) -> JobRun:
    delivery = Delivery("jobs", 0, 7, 1, b"k", b"{}", (), timestamp_ms)
    return JobRun.begin(delivery, now_s=500.0, wall_s=WALL_S)


def test_the_time_in_the_backlog_counts() -> None:
    assert run_of(int(WALL_S * 1000) - 20_000).arrival_s == pytest.approx(480.0)


def test_a_producer_whose_clock_is_ahead_gains_nothing() -> None:
    run = run_of(int(WALL_S * 1000) + 20_000)
    assert run.arrival_s == 500.0
    assert run.stamp_ms == int(WALL_S * 1000) + 20_000


@pytest.mark.parametrize("timestamp_ms", [0, -1])
def test_hazard_a_record_without_a_time_would_have_waited_since_1970(timestamp_ms: int) -> None:
    run = run_of(timestamp_ms)
    assert run.arrival_s == 500.0
    assert run.stamp_ms == int(WALL_S * 1000)
    assert run.origin.endswith(f"@{timestamp_ms}"), "the record is still named by what it carries"
