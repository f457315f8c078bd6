"""How many records a worker asks for: counted in requests, however many of them a job makes."""

from dataclasses import dataclass
from itertools import count

import orjson
import pytest

from scheduler.plan import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.spec import RequestSpec
from service.ingest.delivery import Delivery
from service.settings import load_settings
from service.wire import parse_job
from service.worker.credit import CreditRule
from service.worker.job_run import JobRun
from service.worker.job_table import JobTable
from tests.support.configs import scheduler_config

MAX_NUM_SEQS = 64
READ_AHEAD = 2 * MAX_NUM_SEQS
"""Requests: those that get a slot and as many that wait for one."""


@dataclass
class OpenSink:
    """Publisher, producer and the permission to open jobs, as the credit rule sees them."""

    healthy: bool = True
    ready: bool = True
    open: bool = True


class Worker:
    """The rule over a real table and a real scheduler; jobs come in and go on as Intake moves them."""

    def __init__(self) -> None:
        config = scheduler_config(
            num_blocks=4096, block_size=16, max_num_seqs=MAX_NUM_SEQS, max_model_len=1024,
            max_num_batched_tokens=512,
        )  # fmt: skip
        self.scheduler = Scheduler(config)
        self.table = JobTable()
        self.sink = OpenSink()
        self.credit = CreditRule(
            load_settings({}),
            self.scheduler,
            self.sink,  # type: ignore[arg-type]
            self.sink,  # type: ignore[arg-type]
            self.table,
            may_open=lambda: self.sink.open,
        )
        self._offsets = count()

    def fetch(self, n: int | None) -> JobRun:
        """Adds a record; None: it is not decoded yet."""
        offset = next(self._offsets)
        value = orjson.dumps({"id": f"j{offset}", "prompt": "p", "n": n or 1})
        run = JobRun.begin(Delivery("jobs", 0, offset, 1, None, value, (), 0), now_s=0.0, wall_s=1e9)
        self.table.add(run)
        self.table.enter_intake()
        if n is not None:
            self.table.decoded(run, parse_job(value, key=None, timestamp_ms=0))
        return run

    def hand_on(self, run: JobRun) -> None:
        """Moves the job's requests to the scheduler."""
        assert run.job is not None
        for index in range(run.job.n):
            group = run.job_id if run.job.n > 1 else None
            spec = RequestSpec(
                f"{run.job_id}.{index}", (1, 2), 8, SamplingParams(seed=0), 0.0, fork_group=group
            )
            assert self.scheduler.add(spec, 0.0) is None
        self.table.leave_intake(run)

    def note(self, n: int, times: int = 1) -> None:
        """Adds and ends jobs of n choices."""
        for _ in range(times):
            run = self.fetch(n)
            self.table.leave_intake(run)
            self.table.remove(run)


def test_jobs_of_one_choice_fill_slots_and_read_ahead() -> None:
    worker = Worker()
    assert worker.credit() == READ_AHEAD
    runs = [worker.fetch(1) for _ in range(100)]
    assert worker.credit() == READ_AHEAD - 100
    for run in runs:
        worker.hand_on(run)
    assert worker.credit() == READ_AHEAD - 100


def test_hazard_choices_count_in_intake_as_they_do_in_the_scheduler() -> None:
    worker = Worker()
    runs = [worker.fetch(16) for _ in range(3)]
    assert worker.credit() == (READ_AHEAD - 48) // 16
    for run in runs:
        worker.hand_on(run)
    assert worker.credit() == (READ_AHEAD - 48) // 16
    for _ in range(5):
        worker.fetch(16)
    assert worker.credit() == 0


def test_a_job_not_yet_decoded_counts_as_the_most_choices_seen_recently() -> None:
    worker = Worker()
    worker.note(16)
    for _ in range(3):
        worker.fetch(None)
    assert worker.credit() == (READ_AHEAD - 48) // 16


@pytest.mark.parametrize("num_fetched", [113, 120, 127])
def test_any_room_is_room_for_one_job(num_fetched: int) -> None:
    worker = Worker()
    worker.note(16)
    for _ in range(num_fetched):
        worker.hand_on(worker.fetch(1))
    worker.note(16)
    assert worker.credit() == 1


def test_an_idle_worker_fetches_a_job_however_large_it_may_be() -> None:
    worker = Worker()
    worker.note(16)
    worker.table.mean_prompt_tokens = 1 << 20
    assert worker.credit() == 1


def test_the_most_choices_are_forgotten_slowly_and_learnt_at_once() -> None:
    worker = Worker()
    worker.note(16)
    assert worker.credit() == READ_AHEAD // 16
    worker.note(1, times=22)
    assert worker.credit() == READ_AHEAD // 8
    worker.note(1, times=100)
    assert worker.credit() == READ_AHEAD
    worker.note(16)
    assert worker.credit() == READ_AHEAD // 16


@pytest.mark.parametrize("blocked", ["healthy", "ready", "open"])
def test_no_job_is_fetched_while_results_cannot_be_written(blocked: str) -> None:
    worker = Worker()
    setattr(worker.sink, blocked, False)
    assert worker.credit() == 0
    assert not worker.credit.has_returned()
    setattr(worker.sink, blocked, True)
    assert worker.credit.has_returned()
