"""The result of a job that ran or was refused."""

import pytest

from service.ingest.delivery import Delivery
from service.wire import parse_job
from service.worker.job_run import JobRun
from service.worker.outcome import result_of


def run_of(value: bytes) -> JobRun:
    run = JobRun.begin(Delivery("jobs", 0, 7, 1, b"k", value, (), 1000), now_s=1.0, wall_s=1.0)
    run.job_id = "a"
    return run


LINE = b'{"custom_id":"a b","url":"/v1/completions","body":{"prompt":"x"}}'


@pytest.mark.parametrize("refused", [False, True])
def test_result_of_a_batch_line_carries_its_custom_id_run_or_refused(refused: bool) -> None:
    run = run_of(LINE.replace(b'"x"', b'""') if refused else LINE)
    run.job = None if refused else parse_job(LINE, key=None, timestamp_ms=0)
    result = result_of(run, "rejected" if refused else "completed", worker="w", now_s=2.0)
    assert result.custom_id == "a b"
    assert b'"custom_id":"a b"' in result.encode()


def test_result_of_a_record_without_a_custom_id_has_no_such_field() -> None:
    result = result_of(run_of(b"not json"), "failed", worker="w", now_s=2.0)
    assert b"custom_id" not in result.encode()
