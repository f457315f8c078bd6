"""Runs a file of jobs through the service: streams its lines, bounds jobs in flight, writes one row per line."""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

import orjson

from service.client.client import Client
from service.client.lookup import Seen, other_job, seen_before
from service.errors import JobError
from service.pipelines.rows import Row, Rows, row_key
from service.wire import BOM, ErrorInfo, Job, Result, batch_output, is_line, parse_job
from service.wire.limits import MAX_ID_CHARS, MAX_SHOWN_CHARS

COMPLETED = "completed"


class AttemptedRows(Rows, Protocol):
    """Rows that also know, by key, how often a line was tried before."""

    attempts: dict[str, int]


@dataclass(slots=True)
class Line:
    """One line of the file. `error` says why it holds no job."""

    number: int
    value: bytes
    key: str
    job: Job | None = None
    url: str | None = None
    custom_id: str | None = None
    """Set, like `url`, for an OpenAI Batch line."""
    error: JobError | None = None


@dataclass(slots=True)
class Counts:
    by_status: dict[str, int] = field(default_factory=dict)
    num_skipped: int = 0
    """Lines that an earlier run has done."""

    def count(self, status: str) -> None:
        self.by_status[status] = self.by_status.get(status, 0) + 1

    @property
    def all_good(self) -> bool:
        return not set(self.by_status) - {COMPLETED}


def read_lines(file: IO[bytes], *, model: str, max_bytes: int) -> Iterator[Line]:
    """Yield lines as jobs; memory holds one line of at most `max_bytes`."""
    seen: dict[str, int] = {}
    number = 0
    while line := file.readline(max_bytes + len(BOM) + len(b"\r\n")):
        number += 1
        whole = line
        if number == 1:
            line = line.removeprefix(BOM)
        while not whole.endswith(b"\n") and (rest := file.readline(1 << 16)):
            whole = rest
        if value := line.strip():
            yield _parse(number, value, model, max_bytes, seen)


def _parse(number: int, value: bytes, model: str, max_bytes: int, seen: dict[str, int]) -> Line:
    line = Line(number, value, row_key(line=value.decode(errors="replace"), model=model))
    document = _document(value)
    if is_line(document):
        line.url, line.custom_id = _text(document.get("url")), _text(document["custom_id"])
    try:
        job = parse_job(value, key=None, timestamp_ms=int(time.time() * 1000), max_record_bytes=max_bytes)
        first = seen.setdefault(job.id, number)
        if first != number:
            field, name = ("id", job.id) if line.custom_id is None else ("custom_id", line.custom_id)
            shown = name[:MAX_SHOWN_CHARS]
            raise JobError(
                "duplicate_id", f"{field}: {shown!r} is already on line {first}; the limit is one line per {field}",
                field=field, value=shown, limit=f"one line per {field}", job_id=job.id,
            )  # fmt: skip
    except JobError as error:
        line.error = error
        return line
    line.job = job
    line.key = row_key(job=document, model=job.model or model)
    return line


def _document(value: bytes) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return None  # parse_job says why


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


class BatchRun:
    """One pass over the lines. Rows that an earlier run finished stay as they are."""

    def __init__(
        self, client: Client, rows: AttemptedRows, *, in_flight: int, on_row: Callable[[str], None]
    ) -> None:
        self._client = client
        self._rows = rows
        self._on_row = on_row
        self._slots = asyncio.Semaphore(in_flight)
        self.counts = Counts()

    async def run(self, lines: Iterator[Line]) -> Counts:
        """Run every line and return how many ended in each status.

        Raises DependencyError when a job could not be published.
        """
        try:
            await self._run_all(lines)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return self.counts

    async def _run_all(self, lines: Iterator[Line]) -> None:
        async with asyncio.TaskGroup() as group:
            # Read on a thread: standard input may be slow, and results arrive meanwhile.
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                if line.key in self._rows.kept:
                    self.counts.num_skipped += 1
                    self.counts.count(str(self._rows.kept[line.key].get("status")))
                    continue
                await self._slots.acquire()
                group.create_task(self._run(line)).add_done_callback(lambda _: self._slots.release())

    async def _run(self, line: Line) -> None:
        if line.job is None:
            assert line.error is not None
            self._finish(line, _refused(line, line.error))
            return
        job_id, value = self._published(line, line.job)
        try:
            result = await self._result_of(job_id, value)
        except JobError as error:
            self._finish(line, _refused(line, error))
            return
        self._finish(line, _row(line, line.job, result, self._client.settings.model))

    def _published(self, line: Line, job: Job) -> tuple[str, bytes]:
        """Return id and bytes to publish: unchanged, or under a new id when the line failed before."""
        tries = self._rows.attempts.get(line.key, 0)
        if not tries:
            return job.id, line.value
        job_id = _retry_id(job.id, tries + 1)
        document = orjson.loads(line.value)
        document["id" if line.custom_id is None else "custom_id"] = job_id
        return job_id, orjson.dumps(document)

    async def _result_of(self, job_id: str, value: bytes) -> Result:
        awaited = self._client.expect(job_id)
        try:
            seen = await seen_before(self._client.redis, self._client.settings.namespace, job_id, value)
            if seen is Seen.NEVER:
                await self._client.publish(job_id, value)
            elif seen is Seen.OTHER_JOB:
                raise other_job(job_id)
            elif seen is Seen.ENDED:
                earlier = await self._client.lookup.find(job_id)
                if earlier is not None:
                    return earlier
            return await self._client.result_of(job_id, awaited)
        finally:
            awaited.cancel()

    def _finish(self, line: Line, row: Row) -> None:
        tries = self._rows.attempts.get(line.key, 0) + 1
        self._rows.append(
            row | {"key": line.key, "line": line.number} | ({"tries": tries} if tries > 1 else {})
        )
        self.counts.count(row["status"])
        self._on_row(row["status"])


def _retry_id(job_id: str, tries: int) -> str:
    """Make an id for each try; where it would be too long, a hash replaces the end of the id."""
    suffix = f":r{tries}"
    if len(job_id) + len(suffix) > MAX_ID_CHARS:
        suffix = f":{hashlib.sha256(job_id.encode()).hexdigest()[:16]}{suffix}"
    return job_id[: MAX_ID_CHARS - len(suffix)] + suffix


def _refused(line: Line, error: JobError) -> Row:
    info = ErrorInfo.of(error)
    row: Row = {"id": error.job_id, "status": "rejected", "error": dataclasses.asdict(info)}
    return row | ({} if line.custom_id is None else {"custom_id": line.custom_id, "response": None})


def _row(line: Line, job: Job, result: Result, model: str) -> Row:
    row: Row = orjson.loads(result.encode()) | {"id": job.id}
    if line.url:
        output = batch_output(result, url=line.url, model=job.model or model, created_s=int(time.time()))
        row |= output | {"id": output["id"], "custom_id": line.custom_id}
    return row
