"""Writes the streams of all running jobs: what a step made goes out in one round trip."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from redis.exceptions import ResponseError

from service.errors import InternalError, JobError
from service.stream.config import StreamConfig
from service.stream.keys import JobKeys
from service.stream.outbox import Attempt, Ending, Outbox
from service.stream.pump import Pump
from service.stream.resp import pack_command
from service.stream.resume import ResumedChoice, standing
from service.stream.scripts import APPEND, HAND_BACK, OPEN, Script
from service.wire.common import TokenLogprob
from service.wire.event import Event, parse_event

OPEN_REPLY_LEN = 6
_LOG_PAGE = 512
"""Events read at once when a job is resumed; a page shares its round trip with the other jobs' events."""


class Outcome(StrEnum):
    OPENED = "opened"
    ENDED = "ended"
    """This very record was carried to its end before: its result is durable."""
    DUPLICATE = "duplicate"
    """Another record has this job id."""


@dataclass(frozen=True, slots=True)
class Opened:
    outcome: Outcome
    epoch: int
    """Of this attempt when OPENED, else of the one that holds the stream."""
    cancelled: bool
    """Somebody has asked for the job's cancellation."""
    resumed: tuple[ResumedChoice, ...] = ()
    """One per choice when OPENED: what of earlier attempts stands, to be continued."""
    ended_status: str | None = None
    """How the holder ended; None while it has not."""
    fruitless: int = 1
    """When OPENED: attempts in a row, this one included, that neither brought a delta nor were handed back."""
    same_digest: bool = True
    """The holder's record has the same bytes."""


def _ignore_fenced(job_id: str, epoch: int) -> None:
    del job_id, epoch


class StreamPublisher:
    """Lives on the event loop. `start`, `delta` and `end` enqueue; only `run` talks to Redis.

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
        self._pump = Pump(config, (OPEN, append, HAND_BACK), self._closed)
        self._outboxes: dict[str, Outbox] = {}
        self.num_fenced = 0

    @property
    def healthy(self) -> bool:
        """The last round trip succeeded and none has been waiting for long."""
        return self._pump.healthy

    @property
    def round_trip_s(self) -> float:
        """Total time of all round trips."""
        return self._pump.round_trip_s

    @property
    def num_round_trips(self) -> int:
        return self._pump.num_round_trips

    @property
    def num_failures(self) -> int:
        """Round trips and connections that failed."""
        return self._pump.num_failures

    @property
    def num_lost(self) -> int:
        """Writes that found a Redis which had forgotten acknowledged events."""
        return self._pump.num_lost

    @property
    def num_open_jobs(self) -> int:
        return len(self._outboxes)

    @property
    def backlog_jobs(self) -> int:
        """Jobs with something that Redis has not acknowledged."""
        return sum(outbox.dirty for outbox in self._outboxes.values())

    @property
    def backlog_bytes(self) -> int:
        """About how much that is."""
        return sum(outbox.backlog_bytes for outbox in self._outboxes.values())

    async def run(self) -> None:
        """Until `stop()`. A Redis that is away is waited for; nothing is raised for it."""
        await self._pump.run()

    def stop(self) -> None:
        """Make `run` return once what is due is written, or at the first failure to."""
        self._pump.stop()

    async def open(self, job_id: str, *, origin: str, digest: str, num_choices: int, stream: bool) -> Opened:
        """Take over the job's stream, or learn why not; waits while Redis is away.

        After OPENED no older attempt can write to the log any more. May be cancelled at any time. Raises
        JobError when a key of the job holds something that is not ours.
        """
        keys = JobKeys.of(job_id)
        writer = secrets.token_hex(8)
        ttl_ms = self._config.ttl_s * 1000
        command = pack_command("EVALSHA", OPEN.sha, 2, keys.meta, keys.cancel, origin, digest, writer, ttl_ms)
        try:
            reply = await self._pump.request(command)
            if len(reply) != OPEN_REPLY_LEN:  # Lua cuts a reply at the first value that is none.
                raise ResponseError("the epoch is not a number")
            outcome, epoch, same_digest, ended, cancelled, fruitless = reply
            held = Outcome(outcome.decode())
            events = await self._read_log(keys.log) if stream and held is Outcome.OPENED and epoch > 1 else []
        except ResponseError as error:
            message = f"id {job_id!r}: its keys in Redis hold something else: {error}"
            raise JobError("stream_conflict", message, field="id", value=job_id, job_id=job_id) from error
        if held is not Outcome.OPENED:
            return Opened(
                held,
                epoch,
                bool(cancelled),
                ended_status=ended.decode() or None,
                same_digest=bool(same_digest),
            )
        resumed = standing(job_id, events, num_choices)
        attempt = Attempt(job_id, epoch, writer, origin, digest, stream, self._config.worker)
        self._register(Outbox(attempt, resumed, self._config, self._append))
        return Opened(held, epoch, bool(cancelled), resumed, fruitless=fruitless)

    def restart(self, job_id: str, epoch: int) -> None:
        """Drop what `open` said to stand; the stream begins anew. Before `start`."""
        outbox = self._outbox(job_id, epoch)
        if outbox is not None:
            outbox.discard_resumed()

    def start(self, job_id: str, epoch: int, *, attempt: int = 0) -> bool:
        """Enqueue the start event, before the first delta. False: this attempt is fenced or given up."""
        outbox = self._outbox(job_id, epoch)
        if outbox is None:
            return False
        outbox.start(attempt)
        self._pump.mark(outbox)
        return True

    def delta(
        self,
        job_id: str,
        epoch: int,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> bool:
        """Enqueue tokens and the text they released. False: this attempt is fenced or given up."""
        outbox = self._outbox(job_id, epoch)
        if outbox is None:
            return False
        outbox.delta(index, text, token_ids, logprobs)
        self._pump.mark(outbox)
        return True

    async def flushed(self, job_id: str, epoch: int) -> bool:
        """Wait until all that was enqueued so far is in the log. False: fenced or given up, it never will be.

        Raises DependencyError when `run` returns before that.
        """
        outbox = self._outbox(job_id, epoch)
        return False if outbox is None else await outbox.when_acknowledged()

    async def end(self, job_id: str, epoch: int, ending: Ending) -> bool:
        """Write the end event and mark the job as ended, in one step. False: fenced, and nothing was written.

        Only after the result is durable: from then on a redelivery of the record is suppressed. Raises
        DependencyError when `run` returns before that.
        """
        outbox = self._outbox(job_id, epoch)
        if outbox is None:
            return False
        outbox.end(ending)
        self._pump.mark(outbox)
        try:
            return await outbox.when_acknowledged()
        finally:
            if outbox.closed:
                self._closed(outbox)

    def abandon(self, job_id: str, epoch: int) -> None:
        """Write nothing more for this attempt; the next one continues from what is in the log."""
        outbox = self._outbox(job_id, epoch)
        if outbox is None:
            return
        outbox.close(False)
        self._closed(outbox)
        meta, attempt = JobKeys.of(job_id).meta, outbox.attempt
        self._pump.post(pack_command("EVALSHA", HAND_BACK.sha, 1, meta, attempt.epoch, attempt.writer))

    def _outbox(self, job_id: str, epoch: int) -> Outbox | None:
        outbox = self._outboxes.get(job_id)
        return outbox if outbox is not None and outbox.attempt.epoch == epoch else None

    def _register(self, outbox: Outbox) -> None:
        older = self._outboxes.get(outbox.attempt.job_id)
        if older is not None:
            older.fence()
            self._closed(older)
        self._outboxes[outbox.attempt.job_id] = outbox

    def _closed(self, outbox: Outbox) -> None:
        attempt = outbox.attempt
        if self._outboxes.get(attempt.job_id) is not outbox:
            return
        del self._outboxes[attempt.job_id]
        if outbox.fenced:
            self.num_fenced += 1
            self._on_fenced(attempt.job_id, attempt.epoch)

    async def _read_log(self, key: str) -> list[Event]:
        """Nothing can be added meanwhile: older attempts are fenced, the new one has not started."""
        events: list[Event] = []
        cursor = "-"
        while True:
            page = await self._pump.request(pack_command("XRANGE", key, cursor, "+", "COUNT", _LOG_PAGE))
            try:
                events.extend(parse_event(fields[1]) for _, fields in page)
            except InternalError:
                return events  # Not written by us; what precedes it stands.
            if len(page) < _LOG_PAGE:
                return events
            cursor = "(" + page[-1][0].decode()
