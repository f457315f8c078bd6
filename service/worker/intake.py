"""From a delivered record to requests in the engine, or to a refusal. Event loop only."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import structlog

from scheduler.spec import FinishReason
from service.engine.engine import Engine
from service.errors import JobError
from service.stream.publisher import Opened, Outcome
from service.stream.writer import AttemptWriter
from service.wire import Job, Status, parse_job
from service.wire.job import fingerprint
from service.worker.completion import Completion
from service.worker.edges import Edges
from service.worker.job_run import JobRun
from service.worker.outcome import status_of
from service.worker.specs import RequestBuilder, rejected


class Admission(Enum):
    """How a job came out of the queue."""

    ADMITTED = auto()
    LEFT = auto()
    LATE = auto()


@dataclass(slots=True)
class _Waiting:
    num_requests: int
    may_be_next: asyncio.Event = field(default_factory=asyncio.Event)
    has_left: bool = False


class AdmissionQueue:
    """Jobs that wait until the scheduler's queue has room for all of their requests.

    First come, first served, each with room for all of its requests at once. Bounded by intake credit.

    Credit keeps it empty as far as it can tell. But how many choices a record asks for is seen only when it is here,
    and preempted requests go back into the scheduler's queue: a full queue is a moment's state of ours, never a job's
    fault.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        """`room`: how many more requests the scheduler would queue. No job may ever ask for more than it holds."""
        self._room = room
        self._waiting: OrderedDict[JobRun, _Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, run: JobRun, num_requests: int, limit_s: float | None) -> Admission:
        """Returns at once when no job waits and there is room. After ADMITTED the requests are to be added before
        anything else is awaited; LEFT: `leave` was called; LATE: limit_s is over."""
        if not self._waiting and num_requests <= self._room():
            return Admission.ADMITTED
        waiting = self._waiting[run] = _Waiting(num_requests)
        try:
            async with asyncio.timeout(limit_s):
                while not waiting.has_left and not self._is_first_and_fits(run):
                    waiting.may_be_next.clear()
                    await waiting.may_be_next.wait()
        except TimeoutError:
            return Admission.LEFT if waiting.has_left else Admission.LATE
        finally:
            del self._waiting[run]
            self.wake_next()  # it looks for itself, after this job has added its requests
        return Admission.LEFT if waiting.has_left else Admission.ADMITTED

    def leave(self, run: JobRun) -> None:
        """The job does not want to run any more; nothing happens if it does not wait here."""
        waiting = self._waiting.get(run)
        if waiting is not None:
            waiting.has_left = True
            waiting.may_be_next.set()

    def wake_next(self) -> None:
        """There may be room: to be called after every step and after every end of a request."""
        if self._waiting:
            first = next(iter(self._waiting))
            if self._is_first_and_fits(first):
                self._waiting[first].may_be_next.set()

    def _is_first_and_fits(self, run: JobRun) -> bool:
        is_first = next(iter(self._waiting)) is run
        return is_first and self._waiting[run].num_requests <= self._room()


log = structlog.get_logger(__name__)

FATE_PAUSE_S = 0.05
MAX_FATE_PAUSE_S = 2.0
MAX_FATE_WAIT_S = 120.0
"""For the fate of another record with the same id: longer than a rebalance takes after a crash."""

TOO_MANY_ATTEMPTS = "too_many_attempts"


class Intake:
    """One `take` per delivery, as a task of its own: they wait for Redis and for the tokenizer side by side."""

    def __init__(
        self,
        edges: Edges,
        builder: RequestBuilder,
        engine: Engine,
        queue: AdmissionQueue,
        completion: Completion,
    ) -> None:
        self._edges = edges
        self._builder = builder
        self._engine = engine
        self._queue = queue
        self._completion = completion

    async def take(self, run: JobRun) -> None:
        """Returns when the job is in the engine, settled, or held by a newer attempt."""
        delivery = run.delivery
        try:
            job = parse_job(
                delivery.value,
                key=delivery.key,
                timestamp_ms=delivery.timestamp_ms,
                max_record_bytes=self._edges.names.max_job_bytes,
            )
        except JobError as error:
            await self._completion.refuse_record(run, error)
            return
        self._edges.table.decoded(run, job)
        run.targets = self._builder.targets_of(job)
        try:
            opened = await self._open(run, job)
        except JobError as error:
            await self._completion.refuse_record(run, error)
            return
        if opened.outcome is Outcome.ENDED:
            self._completion.suppress(run)
            return
        if opened.stream is None:
            await self._completion.refuse_duplicate(run, opened)
            return
        self._edges.table.name(run, job.id, opened)
        if opened.decided is not None and await self._completion.repeat(run, opened):
            return
        run.cancelled |= opened.cancelled or self._edges.table.was_cancelled(job.id)
        await self._admit(run, job, opened, opened.stream)

    async def _open(self, run: JobRun, job: Job) -> Opened:
        """Takes the job's stream. While another record with the id may still be refused, and so leave the id to this
        one, it waits for that one's fate; for some time only, because that record may never be fetched."""
        waited_s, pause_s = 0.0, FATE_PAUSE_S
        while True:
            opened = await self._edges.publisher.open(
                job.id,
                origin=run.origin,
                fingerprint=fingerprint(run.delivery.value),
                num_choices=job.n,
                stream=job.stream,
            )
            undecided = (
                opened.outcome is Outcome.DUPLICATE and not opened.same_content and opened.fate is None
            )
            if not undecided or waited_s >= MAX_FATE_WAIT_S or run.abandoned:
                return opened
            self._edges.table.park(run)
            try:
                await asyncio.sleep(pause_s)
            finally:
                self._edges.table.unpark(run)
            waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, MAX_FATE_PAUSE_S)

    async def _admit(self, run: JobRun, job: Job, opened: Opened, stream: AttemptWriter) -> None:
        try:
            self._check_attempts(run, opened.attempts_without_progress)
            prompt = await self._builder.prepare(run, job)
            self._edges.table.note_prompt(len(prompt))
            if not self._resume(run, job, prompt, opened):
                stream.restart()
            stream.start()
            self._close_finished(run, stream)
            if run.abandoned:
                stream.abandon()
                return
            await self._add_requests(run, prompt)
        except JobError as error:
            stream.start()
            status: Status = "failed" if error.code == TOO_MANY_ATTEMPTS else "rejected"
            await self._completion.end(run, status, error)
            return
        # What has nothing left to compute ends here: cancelled or late before it began, or stopped in an earlier
        # attempt.
        if run.finished:
            await self._completion.end(run, status_of(run))

    def _check_attempts(self, run: JobRun, num_attempts: int) -> None:
        """A job that takes its worker down with it must not go on to the next one for ever."""
        limit = self._edges.names.max_attempts
        if num_attempts > limit:
            raise JobError(
                TOO_MANY_ATTEMPTS,
                f"attempts: {num_attempts} in a row without a new token is above the limit {limit}",
                field="attempts",
                value=num_attempts,
                limit=limit,
                job_id=run.job_id,
            )

    def _resume(self, run: JobRun, job: Job, prompt: tuple[int, ...], opened: Opened) -> bool:
        """Take over what earlier attempts streamed. False: another model or tokenizer wrote it."""
        run.choices = self._builder.choices(run, job, prompt)
        pairs = list(zip(run.choices, opened.resumed, strict=True))
        stands = all(choice.resume(earlier.token_ids, earlier.text) for choice, earlier in pairs)
        if stands:
            for choice, earlier in pairs:
                choice.logprobs.extend(earlier.logprobs)
                if choice.detokenizer.stopped:
                    choice.finish = FinishReason.STOP
                elif choice.token_ids:
                    # Complete is complete, whatever was asked for since: a cancellation, a deadline.
                    spec = self._builder.spec(run, choice, prompt)
                    choice.finish = spec.finish_reason(choice.token_ids)
            run.num_resumed_tokens = run.num_output_tokens
            self._edges.metrics.resumed_tokens.inc(run.num_resumed_tokens)
        else:
            log.warning("earlier_tokens_dropped", job_id=job.id, reason="their text is not this tokenizer's")
            run.choices = self._builder.choices(run, job, prompt)
        if run.cancelled:
            run.finish_rest(FinishReason.CANCELLED)
        return stands

    def _close_finished(self, run: JobRun, stream: AttemptWriter) -> None:
        """Stream what a choice that an earlier attempt completed still held back."""
        for choice in run.choices:
            if choice.finish in (FinishReason.STOP, FinishReason.LENGTH) and not choice.detokenizer.stopped:
                text = choice.close()
                if text:
                    stream.delta(choice.index, text, ())

    async def _add_requests(self, run: JobRun, prompt: tuple[int, ...]) -> None:
        """All of them at once, when there is room. Raises JobError, with nothing left in the engine, when the
        scheduler refuses."""
        specs = [self._builder.spec(run, choice, prompt) for choice in run.choices if choice.finish is None]
        if specs and not await self._is_admitted(run, len(specs), specs[0].deadline_s):
            return
        self._edges.table.add_requests(run)
        for spec in specs:
            rejection = self._engine.add(spec)
            if rejection is not None:
                self._withdraw(run)
                raise rejected(rejection, run.job_id)
        if run.stream is not None:
            run.stream.accept()
        self._edges.metrics.prompt_tokens.inc(len(prompt))

    async def _is_admitted(self, run: JobRun, num_requests: int, deadline_s: float | None) -> bool:
        """Whether there is room, to be taken before anything else is awaited."""
        limit_s = None if deadline_s is None else deadline_s - self._edges.clock()
        admission = await self._queue.wait(run, num_requests, limit_s)
        if admission is Admission.LATE:
            run.finish_rest(FinishReason.EXPIRED)
        elif admission is Admission.LEFT and run.cancelled and not run.abandoned:
            run.finish_rest(FinishReason.CANCELLED)
        return admission is Admission.ADMITTED

    def _withdraw(self, run: JobRun) -> None:
        for choice in run.choices:
            self._edges.table.drop_request(choice.request_id)
            self._engine.finish(choice.request_id, FinishReason.CANCELLED)
        run.choices = []
