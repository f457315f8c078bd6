"""What stream tests share: a running publisher, a job from start to end, and everything a reader saw."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from service.stream.assemble import StreamAssembler
from service.stream.keys import JobKeys
from service.stream.publisher import Opened, StreamPublisher
from service.stream.reader import Gap, Item, Verdict, read_stream
from service.stream.stream_config import StreamConfig
from service.stream.writer import AttemptWriter
from service.wire.common import Usage
from service.wire.event import Ending, Event, parse_event
from tests.support.configs import stream_config

DIGEST = "ab" * 32
NAMESPACE = "tailrace"
FAST = stream_config(
    command_timeout_s=2.0,
    connect_timeout_s=2.0,
    stalled_after_s=0.05,
    heartbeat_s=0.1,
    reconnect_min_s=0.01,
    reconnect_max_s=0.05,
    close_timeout_s=0.5,
)
COMPLETED = Ending("completed", "stop", Usage(1, 2, 0))
REFUSED = Ending("rejected", None, Usage(), refused=True)


@asynccontextmanager
async def running_publisher(
    url: str, config: StreamConfig = FAST, **kwargs: Any
) -> AsyncIterator[StreamPublisher]:
    publisher = StreamPublisher(replace(config, redis_url=url), **kwargs)
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        publisher.stop()
        async with asyncio.timeout(5):
            await task


def keys_of(job_id: str) -> JobKeys:
    return JobKeys.of(job_id, NAMESPACE)


async def open_job(
    publisher: StreamPublisher,
    job_id: str,
    *,
    origin: str = "jobs/0/7",
    digest: str = DIGEST,
    num_choices: int = 1,
    stream: bool = True,
) -> Opened:
    return await publisher.open(
        job_id, origin=origin, fingerprint=digest, num_choices=num_choices, stream=stream
    )


def stream_of(opened: Opened) -> AttemptWriter:
    assert opened.stream is not None, opened
    return opened.stream


async def open_stream(publisher: StreamPublisher, job_id: str, **kwargs: Any) -> AttemptWriter:
    return stream_of(await open_job(publisher, job_id, **kwargs))


async def eventually(condition: Callable[[], bool], what: str, limit_s: float = 5.0) -> None:
    """For state that nobody announces."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  -- state of another process, or of a socket
            await asyncio.sleep(0.002)
    assert condition(), what


async def log_events(redis: Redis, job_id: str) -> list[Event]:
    entries: Any = await redis.xrange(keys_of(job_id).log)
    return [parse_event(fields[b"event"]) for _, fields in entries]


class Followed:
    """A reader in a task of its own."""

    def __init__(
        self, redis: Redis, job_id: str, config: StreamConfig = FAST, idle_timeout_s: float = 20
    ) -> None:
        self.assembler = StreamAssembler(job_id)
        self.items: list[Item] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self._changed = asyncio.Event()
        self._stream = read_stream(
            redis, job_id, assembler=self.assembler, config=config, idle_timeout_s=idle_timeout_s
        )
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async with aclosing(self._stream) as stream:
            async for item in stream:
                self.items.append(item)
                self._changed.set()
                await self.may_go_on.wait()

    async def until(self, condition: Callable[["Followed"], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def verdict(self) -> Verdict:
        async with asyncio.timeout(15):
            await self.task
        verdict = self.items[-1]
        assert isinstance(verdict, Verdict)
        return verdict

    @property
    def events(self) -> list[Event]:
        return [item for item in self.items if not isinstance(item, (Gap, Verdict))]

    @property
    def gaps(self) -> list[Gap]:
        return [item for item in self.items if isinstance(item, Gap)]

    async def __aenter__(self) -> "Followed":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        self.task.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(self.task, return_exceptions=True)
