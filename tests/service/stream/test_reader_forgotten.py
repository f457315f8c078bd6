"""A reader ends if its job is gone from Redis, in part or completely; it waits for a job that will be there."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from service.stream.reader import FORGOTTEN_AFTER, Gap
from service.stream.stream_config import StreamConfig
from tests.service.stream.one_job import JOB, begin, begin_and_follow, seen, write
from tests.support.proxy import Direction, Proxy, running_proxy
from tests.support.redis import RedisServer
from tests.support.streams import (
    COMPLETED,
    FAST,
    Followed,
    eventually,
    keys_of,
    open_stream,
    running_publisher,
)

pytestmark = pytest.mark.redis

NO_HEARTBEAT = replace(FAST, heartbeat_s=60.0)
META = keys_of(JOB).meta


async def test_an_evicted_log_of_an_ended_job_is_reported_at_once(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        stream = await begin(publisher)
        await stream.end(COMPLETED)
        await redis.delete(keys_of(JOB).log)
        async with Followed(redis, JOB, NO_HEARTBEAT) as followed:
            verdict = await followed.verdict()
        assert verdict.status == "completed"
        assert verdict.problems == ("the job has ended and its log holds no end event",)
        assert followed.events == []


async def test_a_log_evicted_while_the_reader_was_disconnected_is_reported(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as publisher,
        running_proxy(redis_server.port) as proxy,
        Redis.from_url(proxy.url) as through_proxy,
        Redis.from_url(redis_server.url) as redis,
    ):
        stream = await open_stream(publisher, JOB)
        async with Followed(through_proxy, JOB) as followed:
            await write(stream, range(3))
            await followed.until(seen(4))
            proxy.stall("to_client")
            proxy.cut()
            await stream.end(COMPLETED)
            await redis.delete(keys_of(JOB).log)
            proxy.resume()
            verdict = await followed.verdict()
        assert (verdict.status, verdict.complete) == ("completed", False)
        assert followed.assembler.texts() == ["0 1 2 "], "what came before stays"


async def test_a_job_that_redis_and_every_worker_forgot_ends_as_unknown(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        stream, followed = await begin_and_follow(publisher, redis, 3)
        async with followed:
            stream.abandon()
            redis_server.flush()
            verdict = await followed.verdict()
        assert (verdict.status, verdict.complete) == ("unknown", False)
        assert "results topic" in verdict.problems[0]
        assert followed.gaps == [Gap((stream.epoch, 4), (0, 0), restarted=True)]


class Asked:
    """How often a reader has asked how its job ended: once a heartbeat."""

    def __init__(self, proxy: Proxy, followed: Followed) -> None:
        self.count = 0
        self._followed = followed
        proxy.on_chunk = self._note

    def _note(self, direction: Direction, chunk: bytes) -> None:
        self.count += direction == "to_server" and b"HMGET" in chunk

    async def again(self, times: int) -> None:
        target = self.count + times
        done = self._followed.task.done
        await eventually(lambda: self.count >= target or done(), f"asked {times} times more", 15)
        assert not done(), self._followed.items


@asynccontextmanager
async def watched_reader(
    server: RedisServer, config: StreamConfig = FAST
) -> AsyncIterator[tuple[Followed, Asked]]:
    async with (
        running_proxy(server.port) as proxy,
        Redis.from_url(proxy.url) as redis,
        Followed(redis, JOB, config) as followed,
    ):
        yield followed, Asked(proxy, followed)


async def test_a_job_that_redis_forgot_and_a_worker_has_is_waited_for(redis_server: RedisServer) -> None:
    """Keys are kept alive every third of a second: well within the heartbeats of this reader."""
    async with (
        running_publisher(redis_server.url, replace(FAST, stream_ttl_s=1)) as publisher,
        watched_reader(redis_server, replace(FAST, heartbeat_s=0.2)) as (followed, asked),
    ):
        stream = await open_stream(publisher, JOB)
        await write(stream, range(3))
        await followed.until(seen(4))
        redis_server.flush()
        await asked.again(FORGOTTEN_AFTER + 2)
        await write(stream, range(3, 4))
        await stream.end(COMPLETED)
        assert (await followed.verdict()).complete
        assert followed.gaps == []


async def test_a_job_that_no_worker_has_begun_is_never_called_unknown(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as publisher,
        watched_reader(redis_server) as (followed, asked),
    ):
        await asked.again(FORGOTTEN_AFTER + 2)
        stream = await begin(publisher)
        await stream.end(COMPLETED)
        assert (await followed.verdict()).complete


async def test_hazard_heartbeats_without_the_job_were_added_up_over_outages(
    redis_server: RedisServer,
) -> None:
    """In between Redis had the job, and there was nothing to write."""
    async with (
        running_publisher(redis_server.url) as publisher,
        watched_reader(redis_server) as (followed, asked),
        Redis.from_url(redis_server.url) as redis,
    ):
        stream = await begin(publisher)
        await followed.until(seen(2))
        for _ in range(3):
            await redis.rename(META, "elsewhere")
            await asked.again(FORGOTTEN_AFTER - 2)
            await redis.rename("elsewhere", META)
            await asked.again(2)
        await stream.end(COMPLETED)
        assert (await followed.verdict()).complete
