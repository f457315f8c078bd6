"""Which jobs this worker has, found by record, by job id and by request id. Event loop only."""

import asyncio
from collections.abc import Iterable, Iterator

from service.ingest.delivery import TopicPartition
from service.stream.publisher import Opened
from service.wire import Job
from service.worker.job_run import ChoiceRun, JobRun

MEAN_WEIGHT = 0.1
"""Weight of the newest job in the mean of prompt tokens."""

PEAK_DECAY = 1 / 32
"""How fast the expected number of choices falls with each job that has fewer: a job of 16 is forgotten after about a
hundred of 1."""


class JobTable:
    """Finds the jobs of this worker. Bounded by intake credit: one entry per delivery that is not complete."""

    def __init__(self) -> None:
        self._by_record: dict[tuple[str, int, int], JobRun] = {}
        self._by_job_id: dict[str, JobRun] = {}
        self._by_request: dict[str, tuple[JobRun, ChoiceRun]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_in_intake = 0
        """Jobs that the scheduler does not know yet."""
        self._num_undecoded = 0
        self._num_decoded_choices = 0
        """Choices of the decoded jobs in intake."""
        self._peak_choices = 1.0
        self.mean_prompt_tokens = 1
        """Running mean of prompt tokens over the jobs tokenized so far: the expected cost of the next job."""
        self._unmatched_cancels: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_record)

    @property
    def num_choices_expected(self) -> int:
        """How many choices a job not yet decoded is expected to have: the most that a recent one had. Too low a value
        costs a wait in the admission queue, too high a value another poll; neither leaves a slot empty."""
        return round(self._peak_choices)

    @property
    def num_requests_in_intake(self) -> int:
        """The requests that the jobs in intake are expected to add to the scheduler."""
        return self._num_decoded_choices + self._num_undecoded * self.num_choices_expected

    def __iter__(self) -> Iterator[JobRun]:
        return iter(list(self._by_record.values()))

    def add(self, run: JobRun) -> None:
        self._by_record[run.record] = run
        self._empty.clear()

    def name(self, run: JobRun, job_id: str, opened: Opened) -> None:
        """Register a job whose id is known and whose stream this worker writes."""
        if self._by_job_id.get(run.job_id) is run:
            del self._by_job_id[run.job_id]  # a refusal that lost this id gets a placeholder
        run.job_id, run.stream, run.number = job_id, opened.stream, opened.attempts
        if not run.has_time:
            run.date_ms = opened.began_ms
        self._by_job_id[job_id] = run

    def note_prompt(self, num_tokens: int) -> None:
        self.mean_prompt_tokens = max(
            1, round(self.mean_prompt_tokens + MEAN_WEIGHT * (num_tokens - self.mean_prompt_tokens))
        )

    def note_cancel(self, job_id: str) -> None:
        """Remember a cancellation for an unknown id: the job's stream may just be being opened."""
        if self.num_in_intake:
            self._unmatched_cancels.add(job_id)

    def was_cancelled(self, job_id: str) -> bool:
        return job_id in self._unmatched_cancels

    def enter_intake(self) -> None:
        self.num_in_intake += 1
        self._num_undecoded += 1

    def decoded(self, run: JobRun, job: Job) -> None:
        """Note that a record in intake has been decoded."""
        run.job, run.job_id = job, job.id
        self._num_undecoded -= 1
        self._num_decoded_choices += job.n
        above = max(0.0, self._peak_choices - job.n)
        self._peak_choices = job.n + above * (1 - PEAK_DECAY)

    def park(self, run: JobRun) -> None:
        """Note that the job waits for another one with its id: it needs no place in the scheduler for now."""
        self.num_in_intake -= 1
        self._num_decoded_choices -= run.job.n if run.job is not None else 0

    def unpark(self, run: JobRun) -> None:
        self.num_in_intake += 1
        self._num_decoded_choices += run.job.n if run.job is not None else 0

    def leave_intake(self, run: JobRun) -> None:
        self.num_in_intake -= 1
        if run.job is None:
            self._num_undecoded -= 1
        else:
            self._num_decoded_choices -= run.job.n
        if not self.num_in_intake:
            self._unmatched_cancels.clear()

    def add_requests(self, run: JobRun) -> None:
        """Make requests for the choices that are still to be generated."""
        for choice in run.choices:
            if choice.finish is None:
                self._by_request[choice.request_id] = (run, choice)

    def request(self, request_id: str) -> tuple[JobRun, ChoiceRun] | None:
        return self._by_request.get(request_id)

    def drop_request(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)

    def job(self, job_id: str) -> JobRun | None:
        return self._by_job_id.get(job_id)

    def attempt(self, job_id: str, epoch: int) -> JobRun | None:
        """Return the run that writes, or wrote, the job's stream in this epoch. `job` may find another one, when two
        records with the id are here."""
        return next((run for run in self if run.job_id == job_id and run.epoch == epoch), None)

    def holds(self, run: JobRun) -> bool:
        """Tell whether this run still has to settle its record."""
        return self._by_record.get(run.record) is run

    def remove(self, run: JobRun) -> None:
        """Forget the job; later updates of its requests are ignored."""
        if self._by_record.get(run.record) is run:
            del self._by_record[run.record]
        if self._by_job_id.get(run.job_id) is run:
            del self._by_job_id[run.job_id]
        for choice in run.choices:
            self._by_request.pop(choice.request_id, None)
        if not self._by_record:
            self._empty.set()

    def of_partitions(self, partitions: Iterable[TopicPartition]) -> list[JobRun]:
        lost = set(partitions)
        return [run for run in self if (run.delivery.topic, run.delivery.partition) in lost]

    def open_job_ids(self) -> list[str]:
        """Return the ids of the jobs whose streams this worker writes."""
        return [run.job_id for run in self if run.stream is not None]

    async def when_empty(self) -> None:
        await self._empty.wait()
