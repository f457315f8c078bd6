"""The publisher with a Redis that restarts, forgets or is full."""

import pytest
from redis.asyncio import Redis

from service.stream.publisher import Outcome
from service.wire.event import Delta, Start
from tests.service.stream.one_job import JOB, begin
from tests.support.redis import RedisServer
from tests.support.streams import eventually, keys_of, log_events, open_job, open_stream, running_publisher

pytestmark = pytest.mark.redis


async def test_a_redis_restart_that_loses_the_scripts_and_all_memory_is_survived(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        stream = await begin(publisher)
        redis_server.stop()
        stream.delta(0, "b", (2,))
        await eventually(lambda: not publisher.healthy, "Redis is away")
        redis_server.start()
        assert await stream.flushed()
        assert publisher.stats().losses == 1
        async with Redis.from_url(redis_server.url) as redis:
            assert await log_events(redis, JOB) == [Delta(JOB, stream.epoch, 2, 0, "b", (2,))]
            assert await redis.hget(keys_of(JOB).meta, "origin") == b"jobs/0/7"
        assert publisher.healthy


async def test_scripts_flushed_by_an_operator_are_loaded_again(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        stream = await open_stream(publisher, JOB)
        await redis.script_flush()
        stream.start()
        assert await stream.flushed()
        await redis.script_flush()
        assert (await open_job(publisher, "job-2")).outcome is Outcome.OPENED
        assert isinstance((await log_events(redis, JOB))[0], Start)


async def test_a_full_redis_delays_the_stream_and_loses_nothing(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        stream = await open_stream(publisher, JOB)
        await redis.config_set("maxmemory", "1")
        try:
            stream.start()
            await eventually(lambda: not publisher.healthy, "the refusal is seen")
            assert "maxmemory" in (publisher.stats().problem or "")
        finally:
            await redis.config_set("maxmemory", "0")
        assert await stream.flushed()
        assert len(await log_events(redis, JOB)) == 1
