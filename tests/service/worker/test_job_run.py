"""Times of a delivery, with and without a valid timestamp of the record."""

import orjson
import pytest

from service.ingest.delivery import Delivery
from service.wire import parse_job
from service.worker.job_run import JobRun

WALL_S = 1_900_000_000.0
WALL_MS = int(WALL_S * 1000)
NOW_S = 500.0
NO_TIMES = [0, -1, int(WALL_S), WALL_MS * 1000, WALL_MS * 1_000_000]
"""Never set; in seconds, microseconds and nanoseconds."""


def run_of(timestamp_ms: int, deadline: float | str | None = None) -> JobRun:
    value = orjson.dumps({"id": "job-1", "prompt": "p", "deadline": deadline})
    delivery = Delivery("jobs", 0, 7, 1, b"k", value, (), timestamp_ms)
    run = JobRun.begin(delivery, now_s=NOW_S, wall_s=WALL_S)
    run.job = parse_job(value, key=None, timestamp_ms=timestamp_ms)
    return run


def test_the_time_in_the_backlog_counts() -> None:
    assert run_of(WALL_MS - 20_000).arrival_s == pytest.approx(480.0)


def test_a_producer_whose_clock_is_ahead_gets_no_later_deadline() -> None:
    run = run_of(WALL_MS + 20_000, deadline=30)
    assert run.arrival_s == NOW_S
    assert run.date_ms == WALL_MS + 20_000
    assert run.deadline_s == pytest.approx(NOW_S + 30)


@pytest.mark.parametrize("timestamp_ms", NO_TIMES)
def test_hazard_a_record_without_a_time_would_have_waited_since_1970(timestamp_ms: int) -> None:
    run = run_of(timestamp_ms)
    assert not run.has_time
    assert run.arrival_s == NOW_S
    assert run.date_ms == WALL_MS
    assert run.origin.endswith(f"@{timestamp_ms}"), "the record is still named by what it carries"


@pytest.mark.parametrize("age_s", [0.0, 20.0])
def test_a_deadline_in_seconds_counts_from_the_timestamp(age_s: float) -> None:
    run = run_of(WALL_MS - int(age_s * 1000), deadline=30)
    assert run.has_time
    assert run.deadline_s == pytest.approx(NOW_S - age_s + 30)


@pytest.mark.parametrize("timestamp_ms", [WALL_MS - 20_000, WALL_MS + 20_000, -1])
def test_a_deadline_that_is_a_time_counts_from_the_deployments_clock(timestamp_ms: int) -> None:
    """2030-03-17T17:46:40Z is the wall clock of this test; the stamp has no part in it."""
    run = run_of(timestamp_ms, deadline="2030-03-17T17:47:40Z")
    assert run.deadline_s == pytest.approx(NOW_S + 60)
    run.date_ms -= 5_000  # what JobTable.name does: the first attempt's date
    assert run.deadline_s == pytest.approx(NOW_S + 60)


def test_without_a_deadline_there_is_none() -> None:
    assert run_of(WALL_MS).deadline_s is None
