"""A fake Client for tests of programs that use the service: no Kafka, no Redis, no worker, the same behaviour.

    async with FakeClient(lambda job: f"about {job.prompt}") as client:
        finished = await client.run({"id": "one", "prompt": "trees"})
        assert finished.texts == ("about trees",)

A job is answered as soon as it is published, one character per token, with the events, the result and the verdict that
the service gives. `hold` keeps jobs unanswered until `release` or `cancel`.
"""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Any, Self

from service.client.lookup import Seen
from service.client.run_job import Finished, run_job
from service.errors import JobError
from service.stream.assemble import StreamAssembler
from service.stream.reader import Item, Verdict
from service.wire import (
    Choice,
    Delta,
    End,
    ErrorInfo,
    Event,
    FinishReason,
    Job,
    Result,
    Start,
    Status,
    Usage,
    parse_job,
    text_sha256,
)
from service.wire.job import fingerprint

DEFAULT_MAX_TOKENS = 16
WORKER = "fake"
_UNREADABLE = {"no_value", "record_too_large", "invalid_utf8", "invalid_json", "not_an_object"}
"""Errors of a record that could not be read; the service calls such a job failed and any other bad one rejected."""


def words_from_prompt(job: Job) -> str:
    """Returns the default answer: as many letters as the job allows, which depend on the prompt and on nothing else."""
    prompt = [job.prompt, [message.content for message in job.messages or ()], job.prompt_token_ids]
    letters = hashlib.sha256(repr(prompt).encode()).hexdigest()
    return letters * (1 + (job.max_tokens or DEFAULT_MAX_TOKENS) // len(letters))


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """One record as it was published."""

    job_id: str
    value: bytes
    headers: tuple[tuple[str, bytes], ...]


@dataclasses.dataclass(slots=True)
class _Entry:
    """What the fake service knows of one job id."""

    value: bytes | None = None
    job: Job | None = None
    events: list[Event] = dataclasses.field(default_factory=list)
    result: Result | None = None
    cancelled: bool = False
    waiting: "list[asyncio.Future[Result]]" = dataclasses.field(default_factory=list)
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set and replaced whenever an event is added."""


class FakeClient:
    """Behaves as `service.client.Client` does towards its user; the methods take and raise the same.

    `published` holds every record, in order of publication.
    """

    def __init__(
        self,
        answer: Callable[[Job], str] = words_from_prompt,
        *,
        hold: Callable[[Job], bool] = lambda _: False,
    ) -> None:
        """Takes the answers.

        answer: the text of each choice; it is cut at `max_tokens` characters. A JobError that it raises fails the job.
        hold: whether a job stays running until `release` or `cancel`.
        """
        self._answer = answer
        self._hold = hold
        self._entries: dict[str, _Entry] = {}
        self.published: list[Published] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels the futures of `expect` that still wait."""
        for entry in self._entries.values():
            for future in entry.waiting:
                future.cancel()

    async def publish(
        self, job_id: str, value: bytes, *, headers: tuple[tuple[str, bytes], ...] = ()
    ) -> None:
        """Takes a job and answers it, unless it is held. A job id that was published before changes nothing."""
        self.published.append(Published(job_id, value, headers))
        entry = self._entry(job_id)
        if entry.value is not None and (entry.result is None or entry.result.status != "rejected"):
            return
        entry.value, entry.result, entry.events = value, None, []
        try:
            now_ms = int(time.time() * 1000)
            entry.job = job = parse_job(value, key=job_id.encode(), timestamp_ms=now_ms)
        except JobError as error:
            status: Status = "failed" if error.code in _UNREADABLE else "rejected"
            self._begin(job_id, entry, num_choices=1)
            self._end(job_id, entry, status, (), error=ErrorInfo.of(error))
            return
        self._begin(job_id, entry, num_choices=job.n)
        if entry.cancelled:
            self._end_cancelled(job_id, entry, job)
        elif not self._hold(job):
            self.release(job_id)

    def release(self, job_id: str) -> None:
        """Answers a job that is held. Raises KeyError for an id that was not published."""
        entry = self._entries[job_id]
        job = entry.job
        if job is None or entry.result is not None:
            return
        try:
            answers = [self._answer(job) for _ in range(job.n)]
        except JobError as error:
            self._end(job_id, entry, "failed", (), error=ErrorInfo.of(error))
            return
        choices = tuple(_choice(job, index, text) for index, text in enumerate(answers))
        for choice in choices if job.stream else ():
            for character in choice.text:
                delta = Delta(job_id, 1, len(entry.events), choice.index, character, (ord(character),))
                self._append(entry, delta)
        self._end(job_id, entry, "completed", choices)

    def expect(self, job_id: str) -> "asyncio.Future[Result]":
        """See `Client.expect`."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._entry(job_id).waiting.append(future)
        return future

    async def run(
        self,
        job: Mapping[str, Any],
        *,
        verify_stream: bool = True,
        on_item: Callable[[Item], None] | None = None,
    ) -> Finished:
        """See `Client.run`."""
        return await run_job(self, job, verify_stream=verify_stream, on_item=on_item)

    async def result_of(self, job_id: str, awaited: "asyncio.Future[Result] | None" = None) -> Result:
        """See `Client.result_of`."""
        result = self._entry(job_id).result
        if result is not None and (awaited is None or not awaited.done()):
            return result
        return await (awaited or self.expect(job_id))

    async def seen(self, job_id: str, value: bytes) -> Seen:
        """See `Client.seen`."""
        entry = self._entry(job_id)
        if entry.value is None or (entry.result is not None and entry.result.status == "rejected"):
            return Seen.NEVER
        if fingerprint(entry.value) != fingerprint(value):
            return Seen.OTHER_JOB
        return Seen.RUNNING if entry.result is None else Seen.ENDED

    async def stream(
        self, job_id: str, assembler: StreamAssembler | None = None, *, idle_timeout_s: float | None = None
    ) -> AsyncGenerator[Item, None]:
        """See `Client.stream`."""
        assembler = assembler or StreamAssembler(job_id)
        entry = self._entry(job_id)
        num_read = 0
        while True:
            while num_read < len(entry.events):
                event = entry.events[num_read]
                num_read += 1
                assembler.feed(event)
                yield event
                if isinstance(event, End):
                    yield Verdict(event.status, tuple(assembler.problems()))
                    return
            try:
                async with asyncio.timeout(idle_timeout_s):
                    await entry.changed.wait()
            except TimeoutError:
                raise TimeoutError(f"job {job_id!r}: no event within {idle_timeout_s} s") from None

    async def cancel(self, job_id: str) -> None:
        """Cancels a job that is held, and one that is published later. A job that has ended stays as it is."""
        entry = self._entry(job_id)
        entry.cancelled = True
        if entry.job is not None and entry.result is None:
            self._end_cancelled(job_id, entry, entry.job)

    def _entry(self, job_id: str) -> _Entry:
        return self._entries.setdefault(job_id, _Entry())

    def _begin(self, job_id: str, entry: _Entry, *, num_choices: int) -> None:
        self._append(entry, Start(job_id, 1, (0,) * num_choices, attempt=1, worker=WORKER))

    def _append(self, entry: _Entry, event: Event) -> None:
        entry.events.append(event)
        entry.changed.set()
        entry.changed = asyncio.Event()

    def _end_cancelled(self, job_id: str, entry: _Entry, job: Job) -> None:
        self._end(job_id, entry, "cancelled", tuple(Choice(index, "", "cancelled") for index in range(job.n)))

    def _end(
        self,
        job_id: str,
        entry: _Entry,
        status: Status,
        choices: tuple[Choice, ...],
        *,
        error: ErrorInfo | None = None,
    ) -> None:
        job = entry.job
        result = Result(
            job_id, status, 1, WORKER, choices, _usage(job, choices), error=error,
            metadata=None if job is None else job.metadata, custom_id=None if job is None else job.custom_id,
        )  # fmt: skip
        entry.result = result
        for future in [each for each in entry.waiting if not each.done()]:
            future.set_result(result)
        seq = len(entry.events)
        hashes = tuple(text_sha256([choice.text]) for choice in choices) or (text_sha256([]),)
        reason = choices[0].finish_reason if choices else None
        self._append(entry, End(job_id, 1, seq, status, reason, result.usage, seq + 1, hashes, error))


def _choice(job: Job, index: int, answer: str) -> Choice:
    limit = job.max_tokens or DEFAULT_MAX_TOKENS
    reason: FinishReason = "stop" if len(answer) <= limit else "length"
    text = answer[:limit]
    token_ids = tuple(ord(character) for character in text) if job.return_token_ids else None
    return Choice(index, text, reason, token_ids)


def _usage(job: Job | None, choices: tuple[Choice, ...]) -> Usage:
    if job is None:
        return Usage()
    num_prompt = len(job.prompt or job.prompt_token_ids or "".join(m.content for m in job.messages or ()))
    return Usage(num_prompt, sum(len(choice.text) for choice in choices))
