"""Sends commands to Redis: all that are due in one round trip, repeated until it is acknowledged."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog

from service.errors import DependencyError
from service.stream.connection import UNAVAILABLE, Connection, concerns_one_job, pack_command
from service.stream.keys import AppendReply
from service.stream.stream_config import StreamConfig
from service.stream.writer import AttemptWriter
from service.waiting import wait_for

_log = structlog.get_logger(__name__)

_PING = pack_command("PING")


@dataclass(slots=True)
class _Request:
    command: bytes
    reply: "asyncio.Future[Any]"


class WriteLoop:
    """One connection, one round trip in flight; what becomes due meanwhile is merged for the next one.

    A round trip with an unknown outcome is made again: requests must bear that, and the append script does.
    """

    def __init__(
        self,
        config: StreamConfig,
        check: Callable[[Connection], Awaitable[None]],
        on_closed: Callable[[AttemptWriter], None],
    ) -> None:
        """`check` prepares each new connection; nothing else is sent before it has returned."""
        self._config = config
        self._check = check
        self._on_closed = on_closed
        self._connection = Connection(config, "tailrace-publisher")
        self._backoff = config.backoff("redis_unavailable")
        self._requests: list[_Request] = []
        self._due: dict[AttemptWriter, None] = {}
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopped = False
        self._in_flight_since: float | None = None
        self._working = False
        self.problem: str | None = None
        """Why the last attempt to reach Redis failed; None: it did not."""
        self.num_round_trips = 0
        self.round_trip_s = 0.0
        self.num_failures = 0
        self.num_lost = 0
        """Writes that found a Redis which had forgotten acknowledged events."""

    @property
    def healthy(self) -> bool:
        since = self._in_flight_since
        stalled = (
            since is not None and asyncio.get_running_loop().time() - since > self._config.stalled_after_s
        )
        return self._working and not stalled

    def mark(self, writer: AttemptWriter) -> None:
        if self._stopped:
            writer.fail(_stopped())
        self._due[writer] = None
        self._wake.set()

    async def request(self, command: bytes) -> Any:
        """The command's reply, however long Redis is away. Raises ResponseError when the command is refused.

        Cancelling it never disturbs the connection; the command may be carried out all the same.
        """
        if self._stopped:
            raise _stopped()
        request = _Request(command, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._wake.set()
        return await request.reply

    def post(self, command: bytes) -> None:
        """Send a command and ignore its reply; dropped when `run` has returned."""
        if not self._stopped:
            reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            reply.add_done_callback(_forget)
            self._requests.append(_Request(command, reply))
            self._wake.set()

    def stop(self) -> None:
        """Make `run` return after what is due now is written, or cannot be at the first failure."""
        self._stopping.set()
        self._wake.set()

    async def run(self) -> None:
        try:
            while not self._stopping.is_set() or self._requests or self._due:
                try:
                    await self._connect()
                    await self._wait_for_work()
                    await self._round_trip()
                except UNAVAILABLE as error:
                    self._working, self.problem = False, str(error) or type(error).__name__
                    self.num_failures += 1
                    await self._connection.close()
                    if self._stopping.is_set():
                        break
                    await self._pause(self._backoff.failed(error))
        finally:
            self._working = False
            await self._connection.close()
            self._give_up()

    async def _connect(self) -> None:
        if self._connection.connected:
            return
        await self._connection.connect()
        await self._check(self._connection)
        self._backoff.succeeded()
        self._working, self.problem = True, None

    async def _wait_for_work(self) -> None:
        await wait_for(self._wake, self._config.heartbeat_s)  # Without work it is time for a PING.
        self._wake.clear()

    async def _round_trip(self) -> None:
        requests = [request for request in self._requests if not request.reply.done()]
        writers = [writer for writer in self._due if writer.dirty]
        self._requests, self._due = [], {}
        commands = [request.command for request in requests] + [writer.command() for writer in writers]
        clock = asyncio.get_running_loop().time
        self._in_flight_since = started_s = clock()
        try:
            replies = await self._connection.round_trip(commands or [_PING])
        except BaseException:
            self._requests[:0] = requests
            self._due = dict.fromkeys(writers) | self._due
            raise
        finally:
            self._in_flight_since = None
        self.num_round_trips += 1
        self.round_trip_s += clock() - started_s
        if commands:
            self._distribute(requests, writers, replies)
        elif isinstance(replies[0], Exception):
            raise replies[0]
        self._working, self.problem = True, None

    def _distribute(self, requests: list[_Request], writers: list[AttemptWriter], replies: list[Any]) -> None:
        """Raises the server's refusal after everything that did succeed has been noted."""
        refusal: Exception | None = None
        for request, reply in zip(requests, replies, strict=False):
            if request.reply.done():
                continue
            if not isinstance(reply, Exception):
                request.reply.set_result(reply)
            elif concerns_one_job(reply):
                request.reply.set_exception(reply)
            else:
                refusal = reply
                self._requests.append(request)
        for writer, reply in zip(writers, replies[len(requests) :], strict=True):
            if isinstance(reply, Exception) and not concerns_one_job(reply):
                refusal = reply
                self._due[writer] = None
            else:
                if not writer.closed:
                    self._settle(writer, reply)
        if refusal is not None:
            raise refusal

    def _settle(self, writer: AttemptWriter, reply: Any) -> None:
        if isinstance(reply, Exception):
            _log.error("stream_unwritable", job_id=writer.attempt.job_id, reason=str(reply))
            # Its result is still delivered: all waiters learn that no reply will come.
            writer.close(True)
            self._on_closed(writer)
            return
        writer.acknowledge(AppendReply(reply))
        if reply == AppendReply.WRITTEN_AFTER_LOSS:
            self.num_lost += 1
            _log.warning("stream_lost_events", job_id=writer.attempt.job_id, epoch=writer.attempt.epoch)
        if writer.closed:
            self._on_closed(writer)
        elif writer.dirty:
            self.mark(writer)

    async def _pause(self, seconds: float) -> None:
        await wait_for(self._stopping, seconds)
        self._wake.set()

    def _give_up(self) -> None:
        self._stopped = True
        error = _stopped()
        for request in self._requests:
            if not request.reply.done():
                request.reply.set_exception(error)
        for writer in self._due:
            writer.fail(error)
        self._requests, self._due = [], {}


def _forget(reply: "asyncio.Future[Any]") -> None:
    if not reply.cancelled():
        reply.exception()  # Looked at, so that asyncio does not complain.


def _stopped() -> DependencyError:
    return DependencyError("the stream publisher has stopped and not everything was written to Redis")
