"""A cancellation reaches the worker that has the job, whenever it was requested."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from service.stream.control import CancelListener, request_cancel
from tests.support.redis import RedisServer
from tests.support.streams import FAST, NAMESPACE, keys_of, open_job, running_publisher

pytestmark = pytest.mark.redis


class Heard:
    def __init__(self) -> None:
        self.ids: list[str] = []
        self.active: list[str] = []
        self._changed = asyncio.Event()

    def on_cancel(self, job_id: str) -> None:
        self.ids.append(job_id)
        self._changed.set()

    async def until(self, job_id: str) -> None:
        async with asyncio.timeout(5):
            while job_id not in self.ids:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def listening(url: str, heard: Heard) -> AsyncIterator[CancelListener]:
    listener = CancelListener(replace(FAST, redis_url=url), heard.on_cancel, lambda: heard.active)
    task = asyncio.create_task(listener.run())
    try:
        yield listener
    finally:
        task.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(task, return_exceptions=True)


async def test_a_request_reaches_a_listener_at_once(redis_server: RedisServer) -> None:
    heard = Heard()
    async with Redis.from_url(redis_server.url) as redis, listening(redis_server.url, heard) as listener:
        await asyncio.wait_for(listener.listening.wait(), 5)
        await request_cancel(redis, "job-1", namespace=NAMESPACE)
        await heard.until("job-1")
        assert 0 < await redis.ttl(keys_of("job-1").cancel) <= 3600


async def test_a_request_made_before_the_job_was_fetched_is_found_on_opening(
    redis_server: RedisServer,
) -> None:
    async with Redis.from_url(redis_server.url) as redis, running_publisher(redis_server.url) as publisher:
        await request_cancel(redis, "job-1", namespace=NAMESPACE)
        assert (await open_job(publisher, "job-1")).cancelled
        assert not (await open_job(publisher, "job-2")).cancelled


async def test_a_request_made_while_no_worker_listened_is_found_after_subscribing(
    redis_server: RedisServer,
) -> None:
    heard = Heard()
    heard.active = [f"job-{i}" for i in range(1100)]
    async with Redis.from_url(redis_server.url) as redis:
        await request_cancel(redis, "job-1099", namespace=NAMESPACE)
        await request_cancel(redis, "not-mine", namespace=NAMESPACE)
        async with listening(redis_server.url, heard):
            await heard.until("job-1099")
            assert heard.ids == ["job-1099"]


async def test_requests_survive_the_loss_of_the_listeners_connection(redis_server: RedisServer) -> None:
    heard = Heard()
    async with Redis.from_url(redis_server.url) as redis, listening(redis_server.url, heard) as listener:
        await asyncio.wait_for(listener.listening.wait(), 5)
        for i in range(5):
            heard.active.append(f"job-{i}")
            await redis.client_kill_filter(_type="pubsub")
            await request_cancel(redis, f"job-{i}", namespace=NAMESPACE)
            await heard.until(f"job-{i}")


async def test_a_listener_waits_for_a_redis_that_is_away(redis_server: RedisServer) -> None:
    heard = Heard()
    redis_server.stop()
    async with listening(redis_server.url, heard) as listener, Redis.from_url(redis_server.url) as redis:
        redis_server.start()
        await asyncio.wait_for(listener.listening.wait(), 5)
        await request_cancel(redis, "job-1", namespace=NAMESPACE)
        await heard.until("job-1")
        heard.active = ["job-2"]
        redis_server.stop()
        redis_server.start()
        async with Redis.from_url(redis_server.url) as again:
            await request_cancel(again, "job-2", namespace=NAMESPACE)
            await heard.until("job-2")


async def test_cancelled_looks_up_many_jobs_at_once(redis_server: RedisServer) -> None:
    heard = Heard()
    async with Redis.from_url(redis_server.url) as redis, listening(redis_server.url, heard) as listener:
        await request_cancel(redis, "b", namespace=NAMESPACE)
        assert await listener.cancelled(["a", "b", "c"]) == ["b"]
        assert await listener.cancelled([]) == []
