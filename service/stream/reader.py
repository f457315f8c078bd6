"""Follows one job's stream from the client's side: no event lost or doubled, and every gap reported."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from service.errors import InternalError
from service.stream.assemble import Fed, StreamAssembler
from service.stream.connection import UNAVAILABLE
from service.stream.keys import EVENT_FIELD, JobKeys
from service.stream.stream_config import StreamConfig
from service.stream.subscription import Sign, subscription
from service.waiting import cancellation_kept
from service.wire.event import Event, parse_event

FORGOTTEN_AFTER = 6
"""Heartbeats; longer than a live worker needs to write again what Redis forgot (`publisher.KEEP_ALIVE_S`)."""
_LOG_PAGE = 512


@dataclass(frozen=True, slots=True)
class Gap:
    """Events are missing and are not in the log either; the next items come after the gap."""

    expected: tuple[int, int]
    """(epoch, seq) that should have come."""
    found: tuple[int, int]
    restarted: bool = False
    """The log starts over, or is gone: the events received before are void."""

    def __str__(self) -> str:
        return f"events are missing: expected (epoch, seq) {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The last item of every stream."""

    status: str
    """How the job ended; `unknown` when Redis has forgotten the job."""
    problems: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Count and hash agree with the end event: the text received is the whole text."""
        return not self.problems


Item = Event | Gap | Verdict


async def read_stream(
    redis: Redis,
    job_id: str,
    *,
    config: StreamConfig,
    assembler: StreamAssembler | None = None,
    idle_timeout_s: float | None = None,
) -> AsyncGenerator[Item, None]:
    """Yield every event once and in order, from the first one whenever the reader joins; a Verdict ends it.

    `assembler` is kept up to date, for the texts. A job that Redis does not know (yet) is waited for. Raises
    TimeoutError after `idle_timeout_s` without an event, InternalError for an entry or a message that is no event, and
    ValueError for another job's. Leave early with `contextlib.aclosing`.

    Events are taken from the log of the client's own database; the live channel, which all databases of a server
    share, only announces new events, or carries the next event of an attempt that the log has shown.
    """
    backoff = config.backoff("redis_stream_lost")
    reader = _Reader(redis, assembler or StreamAssembler(job_id), config)
    idle = _IdleLimit(job_id, idle_timeout_s)
    while True:
        try:
            async with aclosing(subscription(redis, reader.keys.live, config)) as source:
                while True:
                    items = await idle.within(_next_items(source, reader))
                    backoff.succeeded()
                    for item in items:
                        yield item
                        if isinstance(item, Verdict):
                            return
                    if items:
                        idle.restart()
        except UNAVAILABLE as error:
            idle.check()
            await asyncio.sleep(backoff.failed(error))


async def _next_items(source: AsyncGenerator[bytes | Sign, None], reader: "_Reader") -> list[Item]:
    return await reader.take(await anext(source))


class _Reader:
    def __init__(self, redis: Redis, assembler: StreamAssembler, config: StreamConfig) -> None:
        self.keys = JobKeys.of(assembler.job_id, config.namespace)
        self._redis = redis
        self._assembler = assembler
        self._num_unknown = 0
        """Heartbeats in a row at which Redis knew nothing of a job whose stream had begun."""

    async def take(self, received: bytes | Sign) -> list[Item]:
        if isinstance(received, bytes):
            items = await self._take_live(parse_event(received))
        elif received is Sign.CONFIRMED:
            items = list(self._catch_up(await self._read_log()))
        else:
            items = []
        if items:
            self._num_unknown = 0
        return items + await self._verdict(asked=received is Sign.SILENCE or not self._assembler.epoch)

    async def _take_live(self, event: Event) -> list[Item]:
        assembler = self._assembler
        fed = assembler.feed(event) if event.epoch <= assembler.epoch else Fed.GAP
        if fed is not Fed.GAP:
            return [event] if fed is Fed.APPLIED else []
        # The log was written first: what was missed on the channel stands there, with this event.
        items = list(self._catch_up(await self._read_log()))
        if event.epoch == assembler.epoch and _position(event) >= assembler.position:
            items += self._catch_up([event])
        return items

    def _catch_up(self, events: list[Event]) -> Iterable[Item]:
        assembler = self._assembler
        if events and (events[-1].epoch, events[-1].seq + 1) < assembler.position:
            yield Gap(assembler.position, _position(events[0]), restarted=True)
            assembler.reset()
        for event in events:
            expected = assembler.position
            fed = assembler.feed(event)
            if fed is Fed.GAP:
                assembler.skip_to(event)
                yield Gap(expected, _position(event))
            if fed is not Fed.DUPLICATE:
                yield event

    async def _verdict(self, *, asked: bool) -> list[Item]:
        """The verdict, if the job has ended; `asked` looks at its meta for an end that no event tells of."""
        end = self._assembler.end
        if end is not None:
            return [Verdict(end.status, tuple(self._assembler.problems()))]
        if not asked:
            return []
        status, epoch = await self._redis.hmget(self.keys.meta, ["ended", "epoch"])
        if status is None:
            if epoch is None:
                return self._unknown()
            self._num_unknown = 0
            return []
        items = list(self._catch_up(await self._read_log()))
        if self._assembler.end is not None:
            return [*items, *await self._verdict(asked=False)]
        return [*items, Verdict(_text(status), ("the job has ended and its log holds no end event",))]

    def _unknown(self) -> list[Item]:
        """A live worker writes a job that Redis forgot there again; after some heartbeats none has it."""
        self._num_unknown += self._assembler.epoch > 0
        if self._num_unknown < FORGOTTEN_AFTER:
            return []
        reason = "Redis has forgotten the job; if it has ended, its result is on the results topic"
        return [Gap(self._assembler.position, (0, 0), restarted=True), Verdict("unknown", (reason,))]

    async def _read_log(self) -> list[Event]:
        """At most the log's bounded length."""
        events: list[Event] = []
        cursor = "-"
        while True:
            # Bytes or str, by the client's settings.
            page: list[Any] = await self._redis.xrange(self.keys.log, cursor, "+", count=_LOG_PAGE) or []
            events.extend(_event_of(fields) for _, fields in page)
            if len(page) < _LOG_PAGE:
                return events
            cursor = "(" + _text(page[-1][0])


def _event_of(fields: dict[Any, Any]) -> Event:
    """Raises InternalError for an entry of the log that holds no event."""
    event = fields.get(EVENT_FIELD.encode(), fields.get(EVENT_FIELD))
    if event is None:
        raise InternalError(f"event: an entry of the log has no field {EVENT_FIELD!r}")
    return parse_event(event if isinstance(event, bytes) else event.encode())


class _IdleLimit:
    def __init__(self, job_id: str, limit_s: float | None) -> None:
        self._job_id = job_id
        self._limit_s = limit_s
        self.restart()

    def restart(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._deadline_s = None if self._limit_s is None else now_s + self._limit_s

    async def within(self, items: Awaitable[list[Item]]) -> list[Item]:
        async with asyncio.timeout_at(self._deadline_s):
            with cancellation_kept():
                return await items

    def check(self) -> None:
        if self._deadline_s is not None and asyncio.get_running_loop().time() >= self._deadline_s:
            raise TimeoutError(f"job {self._job_id!r}: no event within {self._limit_s} s") from None


def _position(event: Event) -> tuple[int, int]:
    return event.epoch, event.seq


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()
