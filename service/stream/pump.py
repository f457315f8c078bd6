"""Carries commands to Redis: all that is due in one round trip, again and again until it is acknowledged."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from redis.exceptions import ResponseError

from service.errors import DependencyError
from service.stream.backoff import Backoff
from service.stream.config import StreamConfig
from service.stream.link import UNAVAILABLE, Link
from service.stream.outbox import Outbox
from service.stream.resp import pack_command
from service.stream.scripts import AppendReply, Script

_log = structlog.get_logger(__name__)

_PING = pack_command("PING")


@dataclass(slots=True)
class _Request:
    command: bytes
    reply: "asyncio.Future[Any]"


class Pump:
    """One connection, one round trip in flight; what becomes due meanwhile is merged for the next one.

    A round trip with an unknown outcome is made again: requests must bear that, and the append script does.
    """

    def __init__(
        self, config: StreamConfig, scripts: tuple[Script, ...], on_closed: Callable[[Outbox], None]
    ) -> None:
        self._config = config
        self._scripts = scripts
        self._on_closed = on_closed
        self._link = Link(config, "tailrace-publisher")
        self._backoff = Backoff(config, "redis_unavailable")
        self._requests: list[_Request] = []
        self._due: dict[Outbox, None] = {}
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopped = False
        self._in_flight_since: float | None = None
        self._working = False
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

    def mark(self, outbox: Outbox) -> None:
        if self._stopped:
            outbox.fail(_stopped())
        self._due[outbox] = None
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
        """Send a command whose reply nobody needs; dropped when `run` has returned."""
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
                    self._working = False
                    self.num_failures += 1
                    await self._link.close()
                    if self._stopping.is_set():
                        break
                    await self._pause(self._backoff.failed(error))
        finally:
            self._working = False
            await self._link.close()
            self._give_up()

    async def _connect(self) -> None:
        if self._link.connected:
            return
        await self._link.connect()
        for reply in await self._link.round_trip(
            [pack_command("SCRIPT", "LOAD", s.source) for s in self._scripts]
        ):
            if isinstance(reply, Exception):
                raise reply
        self._backoff.succeeded()
        self._working = True

    async def _wait_for_work(self) -> None:
        try:
            async with asyncio.timeout(self._config.heartbeat_s):
                await self._wake.wait()
        except TimeoutError:
            pass  # Time for a sign of life.
        self._wake.clear()

    async def _round_trip(self) -> None:
        requests = [request for request in self._requests if not request.reply.done()]
        outboxes = [outbox for outbox in self._due if outbox.dirty]
        self._requests, self._due = [], {}
        commands = [request.command for request in requests] + [outbox.command() for outbox in outboxes]
        clock = asyncio.get_running_loop().time
        self._in_flight_since = started_s = clock()
        try:
            replies = await self._link.round_trip(commands or [_PING])
        except BaseException:
            self._requests[:0] = requests
            self._due = dict.fromkeys(outboxes) | self._due
            raise
        finally:
            self._in_flight_since = None
        self.num_round_trips += 1
        self.round_trip_s += clock() - started_s
        if commands:
            self._distribute(requests, outboxes, replies)
        self._working = True

    def _distribute(self, requests: list[_Request], outboxes: list[Outbox], replies: list[Any]) -> None:
        """Raises the server's refusal after everything that did succeed has been noted."""
        refusal: Exception | None = None
        for request, reply in zip(requests, replies, strict=False):
            if request.reply.done():
                continue
            if not isinstance(reply, Exception):
                request.reply.set_result(reply)
            elif _concerns_one_job(reply):
                request.reply.set_exception(reply)
            else:
                refusal = reply
                self._requests.append(request)
        for outbox, reply in zip(outboxes, replies[len(requests) :], strict=True):
            if isinstance(reply, Exception) and not _concerns_one_job(reply):
                refusal = reply
                self._due[outbox] = None
            else:
                if not outbox.closed:
                    self._settle(outbox, reply)
        if refusal is not None:
            raise refusal

    def _settle(self, outbox: Outbox, reply: Any) -> None:
        if isinstance(reply, Exception):
            _log.error("stream_unwritable", job_id=outbox.attempt.job_id, reason=str(reply))
            # Its result still goes out, so whoever asks is told that there is nothing to wait for.
            outbox.close(True)
            return
        outbox.acknowledge(AppendReply(reply))
        if reply == AppendReply.WRITTEN_AFTER_LOSS:
            self.num_lost += 1
            _log.warning("stream_lost_events", job_id=outbox.attempt.job_id, epoch=outbox.attempt.epoch)
        if outbox.closed:
            self._on_closed(outbox)
        elif outbox.dirty:
            self.mark(outbox)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass
        self._wake.set()

    def _give_up(self) -> None:
        self._stopped = True
        error = _stopped()
        for request in self._requests:
            if not request.reply.done():
                request.reply.set_exception(error)
        for outbox in self._due:
            outbox.fail(error)
        self._requests, self._due = [], {}


def _forget(reply: "asyncio.Future[Any]") -> None:
    if not reply.cancelled():
        reply.exception()  # Looked at, so that asyncio does not complain.


def _stopped() -> DependencyError:
    return DependencyError("the stream publisher has stopped and not everything was written to Redis")


def _concerns_one_job(error: Exception) -> bool:
    """Whether the refusal is about the keys of one job, not about the server."""
    if type(error) is not ResponseError:
        return False
    return str(error).startswith(("WRONGTYPE", "user_script")) or getattr(error, "status_code", None) == "ERR"
