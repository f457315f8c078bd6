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
    """How a job left the queue."""

    ADMITTED = auto()
    LEFT = auto()
    LATE = auto()


@dataclass(slots=True)
class _Waiting:
    num_requests: int
    may_be_next: asyncio.Event = field(default_factory=asyncio.Event)
    has_left: bool = False


class AdmissionQueue:
    """Admits jobs in order of arrival, each once there is room for all of its requests. Bounded by intake credit.

    Credit should keep it empty, but the number of choices of a record is unknown until it is decoded, and preempted
    requests return to the scheduler's queue: a full queue is temporary and never a job's fault.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        """`room` returns how many more requests the scheduler would queue. No job may have more requests than its
        maximum."""
        self._room = room
        self._waiting: OrderedDict[JobRun, _Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, run: JobRun, num_requests: int, limit_s: float | None) -> Admission:
        """Waits for room; returns at once when no job waits and there is room. After ADMITTED the caller adds the
        requests before it awaits anything else. LEFT: `leave` was called. LATE: limit_s has passed."""
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
            self.wake_next()  # the next job checks for room after this one has added its requests
        return Admission.LEFT if waiting.has_left else Admission.ADMITTED

    def leave(self, run: JobRun) -> None:
        """Removes a job from the queue, if it waits there."""
        waiting = self._waiting.get(run)
        if waiting is not None:
            waiting.has_left = True
            waiting.may_be_next.set()

    def wake_next(self) -> None:
        """Admits jobs if there is room. Call it after every step and whenever a request ends."""
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
"""How long a record waits for another one with its id to be accepted or refused: longer than a rebalance after a
crash."""

TOO_MANY_ATTEMPTS = "too_many_attempts"


class Intake:
    """Takes jobs in, one task per delivery, so that several can wait for Redis and the tokenizer at once."""

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
        """Take one delivery; returns when the job is in the engine, settled, or held by a newer attempt."""
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
        if run.abandoned:
            opened.stream.abandon()  # it was lost while the stream was being opened
            return
        self._edges.table.name(run, job.id, opened)
        if opened.decided is not None and await self._completion.repeat(run, opened):
            return
        run.cancelled |= opened.cancelled or self._edges.table.was_cancelled(job.id)
        await self._admit(run, job, opened, opened.stream)

    async def _open(self, run: JobRun, job: Job) -> Opened:
        """Take the job's stream. Another record with the same id may still be refused and free the id, so wait for
        its outcome; only for a limited time, because that record may never be fetched."""
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
        # A job with nothing left to compute ends here: cancelled or expired before it began, or stopped in an earlier
        # attempt.
        if run.finished:
            await self._completion.end(run, status_of(run))

    def _check_attempts(self, run: JobRun, num_attempts: int) -> None:
        """Refuse a job that has killed its worker too often, so that it is not passed on forever."""
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
        """Continue from what earlier attempts streamed. False: another model or tokenizer wrote it."""
        run.choices = self._builder.choices(run, job, prompt)
        pairs = list(zip(run.choices, opened.resumed, strict=True))
        stands = all(choice.resume(earlier.token_ids, earlier.text) for choice, earlier in pairs)
        if stands:
            for choice, earlier in pairs:
                choice.logprobs.extend(earlier.logprobs)
                if choice.detokenizer.stopped:
                    choice.finish = FinishReason.STOP
                elif choice.token_ids:
                    # A job with all its tokens is completed, even if it was cancelled or its deadline has passed since.
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
        """Stream the text that was still held back in a choice completed by an earlier attempt."""
        for choice in run.choices:
            if choice.finish in (FinishReason.STOP, FinishReason.LENGTH) and not choice.detokenizer.stopped:
                text = choice.close()
                if text:
                    stream.delta(choice.index, text, ())

    async def _add_requests(self, run: JobRun, prompt: tuple[int, ...]) -> None:
        """Add all requests at once, when there is room. Raises JobError, with nothing left in the engine, when the
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
        """Tell whether there is room; the caller uses it before it awaits anything else."""
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
