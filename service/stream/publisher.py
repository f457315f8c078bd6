"""Writes the streams of all running jobs; the events of a step go out in one round trip."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from redis.exceptions import ResponseError

from service.errors import InternalError, JobError
from service.stream.assemble import ResumedChoice, standing
from service.stream.connection import pack_command
from service.stream.keys import APPEND, CLAIM, HAND_BACK, OPEN, Attempt, JobKeys, Script, deployment_key
from service.stream.server_check import ServerCheck
from service.stream.stream_config import StreamConfig
from service.stream.write_loop import WriteLoop
from service.stream.writer import AttemptWriter
from service.wire.event import Event, parse_event

KEEP_ALIVE_S = 20.0
"""Longest time between two writes to the keys of an open job; a server that forgot them has them again after it."""
_LOG_PAGE = 512
"""Events read at once when a job is resumed; a page shares its round trip with the other jobs' events."""


class Outcome(StrEnum):
    OPENED = "opened"
    ENDED = "ended"
    """This record has ended before: its result is durable."""
    DUPLICATE = "duplicate"
    """Another record has this job id."""


@dataclass(frozen=True, slots=True)
class Opened:
    outcome: Outcome
    epoch: int
    """This attempt's when OPENED, else that of the attempt that holds the stream."""
    cancelled: bool
    """Cancellation of the job was requested."""
    resumed: tuple[ResumedChoice, ...] = ()
    """One per choice when OPENED: the kept part of earlier attempts, to be continued."""
    stream: AttemptWriter | None = None
    """The writer of this attempt, when OPENED."""
    fate: str | None = None
    """How the holder ended, or `accepted`: it will run. None: it may still be refused, and the id be free."""
    attempts: int = 1
    """When OPENED: how often the record was begun, this time included."""
    attempts_without_progress: int = 1
    """When OPENED: attempts in a row, this one included, that neither brought a delta nor were handed back."""
    began_ms: int = 0
    """When OPENED: server's clock at the first attempt, the same for all of them."""
    decided: bytes | None = None
    """When OPENED: the result that an earlier attempt decided and may have sent; it is final."""
    same_content: bool = True
    """The holder's record has the same bytes."""


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """A snapshot of the publisher. Counts are over its life."""

    healthy: bool
    problem: str | None
    """Why Redis could not be used at the last attempt; None: it could."""
    open_jobs: int
    backlog_jobs: int
    """Jobs with events that Redis has not acknowledged."""
    backlog_bytes: int
    """Estimate of the size of these events."""
    round_trips: int
    round_trip_s: float
    """Total time of all round trips."""
    failures: int
    """Round trips and connections that failed."""
    losses: int
    """Writes that found a Redis which had forgotten acknowledged events."""
    fenced: int
    """Attempts that ended because a newer one had started."""


def _ignore_fenced(job_id: str, epoch: int) -> None:
    del job_id, epoch


class StreamPublisher:
    """Lives on the event loop. `open` returns the writer of an attempt; only `run` talks to Redis.

    While Redis is slow or away, the deltas of a job merge: memory is bounded by the open jobs' max_tokens.
    `healthy` then tells intake to take no more jobs. A reconnect loses nothing and writes nothing twice.
    """

    def __init__(
        self,
        config: StreamConfig,
        *,
        on_fenced: Callable[[str, int], None] = _ignore_fenced,
        append: Script = APPEND,
    ) -> None:
        self._config = config
        self._on_fenced = on_fenced
        self._append = append
        self._loop = WriteLoop(config, ServerCheck(config, append), self._closed)
        self._writers: dict[str, AttemptWriter] = {}
        self._num_fenced = 0
        self.deployment = ""
        """Fingerprint of the deployment whose jobs these are; set before the first `open`."""

    @property
    def healthy(self) -> bool:
        """Whether the last round trip succeeded and none has been waiting for long."""
        return self._loop.healthy

    def stats(self) -> PublisherStats:
        loop, writers = self._loop, self._writers.values()
        return PublisherStats(
            healthy=loop.healthy,
            problem=loop.problem,
            open_jobs=len(writers),
            backlog_jobs=sum(writer.dirty for writer in writers),
            backlog_bytes=sum(writer.backlog_bytes for writer in writers),
            round_trips=loop.num_round_trips,
            round_trip_s=loop.round_trip_s,
            failures=loop.num_failures,
            losses=loop.num_lost,
            fenced=self._num_fenced,
        )

    async def run(self) -> None:
        """Write until `stop()`; wait while Redis is away or refuses. Raises SettingsError when it is too old."""
        keeping = asyncio.create_task(self._keep_alive())
        try:
            await self._loop.run()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep_alive(self) -> None:
        """Keep the keys of open jobs from expiring, however long the jobs wait."""
        while True:
            await asyncio.sleep(min(self._config.stream_ttl_s / 3, KEEP_ALIVE_S))
            for writer in self._writers.values():
                writer.keep_alive()

    def stop(self) -> None:
        """Make `run` return once what is due is written, or at the first failure to."""
        self._loop.stop()

    async def open(
        self,
        job_id: str,
        *,
        origin: str,
        fingerprint: str,
        num_choices: int,
        stream: bool,
        refusal: bool = False,
    ) -> Opened:
        """Take over the job's stream, or say why not; waits while Redis is away.

        With `refusal` the record will be refused: its id stays free for another one, which may take it at any time.

        After OPENED no older attempt can write to the log any more. May be cancelled at any time. Raises
        JobError when a key of the job holds something that is not ours.
        """
        keys = JobKeys.of(job_id, self._config.namespace)
        nonce = secrets.token_hex(8)
        command = pack_command(
            "EVALSHA", OPEN.sha, 3, keys.meta, keys.cancel, keys.log,
            origin, fingerprint, nonce, self._config.stream_ttl_s * 1000, self.deployment, int(refusal),
        )  # fmt: skip
        try:
            outcome, epoch, same_content, ended, cancelled, *counts, decided = await self._loop.request(
                command
            )
            held = Outcome(outcome.decode())
            num_idle, number, began_ms = counts
            events = (
                await self._read_log(keys.log) if stream and held is Outcome.OPENED and number > 1 else []
            )
        except ResponseError as error:
            message = f"id {job_id!r}: its keys in Redis hold something else: {error}"
            raise JobError("stream_conflict", message, field="id", value=job_id, job_id=job_id) from error
        if held is not Outcome.OPENED:
            return Opened(
                held,
                epoch,
                bool(cancelled),
                fate=ended.decode() or None,
                same_content=bool(same_content),
            )
        resumed = standing(job_id, events, num_choices)
        attempt = Attempt(
            job_id, epoch, nonce, origin, fingerprint, stream, number, self.deployment, self._config.worker
        )
        return Opened(
            held,
            epoch,
            bool(cancelled),
            resumed,
            stream=self._new_writer(attempt, resumed),
            attempts=number,
            attempts_without_progress=num_idle,
            began_ms=began_ms,
            decided=decided or None,
        )

    async def origin_of(self, job_id: str) -> str | None:
        """Return the record that owns the id, or None. Waits while Redis is away."""
        meta = JobKeys.of(job_id, self._config.namespace).meta
        origin: bytes | None = await self._loop.request(pack_command("HGET", meta, "origin"))
        return None if origin is None else origin.decode(errors="replace")

    async def claim(self, identity: str) -> tuple[str | None, float]:
        """Take or keep the namespace for the deployment `identity`; waits while Redis is away.

        Returns the holder's identity when another deployment has it, and the server's clock in seconds.
        """
        ttl_ms = round(self._config.claim_ttl_s * 1000)
        key = deployment_key(self._config.namespace)
        command = pack_command("EVALSHA", CLAIM.sha, 1, key, identity, ttl_ms)
        holder, seconds, microseconds = await self._loop.request(command)
        return holder.decode(errors="replace") or None, int(seconds) + int(microseconds) / 1e6

    def _new_writer(self, attempt: Attempt, resumed: tuple[ResumedChoice, ...]) -> AttemptWriter:
        older = self._writers.get(attempt.job_id)
        if older is not None:
            older.fence()
            self._closed(older)
        writer = self._writers[attempt.job_id] = AttemptWriter(
            attempt,
            resumed,
            self._config,
            self._append,
            mark=self._loop.mark,
            on_closed=self._closed,
        )
        return writer

    def _closed(self, writer: AttemptWriter) -> None:
        attempt = writer.attempt
        if self._writers.get(attempt.job_id) is not writer:
            return
        del self._writers[attempt.job_id]
        if writer.fenced:
            self._num_fenced += 1
            self._on_fenced(attempt.job_id, attempt.epoch)
        elif not writer.ended:
            meta = JobKeys.of(attempt.job_id, self._config.namespace).meta
            self._loop.post(pack_command("EVALSHA", HAND_BACK.sha, 1, meta, attempt.epoch, attempt.writer))

    async def _read_log(self, key: str) -> list[Event]:
        """Nothing can be added meanwhile: older attempts are fenced, the new one has not started."""
        events: list[Event] = []
        cursor = "-"
        while True:
            page = await self._loop.request(pack_command("XRANGE", key, cursor, "+", "COUNT", _LOG_PAGE))
            try:
                events.extend(parse_event(fields[1]) for _, fields in page)
            except InternalError:
                return events  # Not written by us; what precedes it stands.
            if len(page) < _LOG_PAGE:
                return events
            cursor = "(" + page[-1][0].decode()
