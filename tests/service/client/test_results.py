"""Results reach the callers that wait for them, even if they were written before the call."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer
from redis.asyncio import Redis

from service.client.client import Client
from service.client.lookup import Seen, seen_before
from service.client.result_topic import read_results
from service.embedded.stack import EmbeddedStack
from service.settings import Settings, load_settings
from service.wire import Result
from service.wire.job import fingerprint
from tests.support.streams import keys_of


@pytest.fixture
async def settings() -> AsyncIterator[Settings]:
    async with EmbeddedStack(announce=False) as stack:
        yield load_settings(
            {"TAILRACE_KAFKA_BOOTSTRAP": stack.kafka_bootstrap, "TAILRACE_REDIS_URL": stack.redis_url}
        )


async def _write(settings: Settings, *results: Result) -> None:
    async with AIOKafkaProducer(bootstrap_servers=settings.kafka_bootstrap, acks="all") as producer:
        for result in results:
            await producer.send_and_wait(settings.results_topic, result.encode(), key=result.id.encode())


async def test_only_expected_results_are_handed_out_and_none_is_kept(settings: Settings) -> None:
    async with Client(settings) as client:
        awaited = [client.results.expect(f"job-{number}") for number in range(20)]
        await _write(settings, *(Result(f"job-{number}", "completed", 1, "w") for number in range(40)))
        assert [(await each).id for each in awaited] == [f"job-{number}" for number in range(20)]
        await asyncio.sleep(0)
        assert client.results.stats().num_expected == 0


async def test_two_callers_may_wait_for_one_result(settings: Settings) -> None:
    async with Client(settings) as client:
        first, second, cancelled = (client.expect("job-1") for _ in range(3))
        cancelled.cancel()
        await _write(settings, Result("job-1", "completed", 1, "w"))
        assert await client.result_of("job-1", first) == await client.result_of("job-1", second)
        assert client.stats().results.num_expected == 0


async def test_cancelled_waiter_is_forgotten(settings: Settings) -> None:
    async with Client(settings) as client:
        client.results.expect("job-1").cancel()
        await asyncio.sleep(0)
        assert client.results.stats().num_expected == 0


async def test_result_that_came_before_is_found_on_the_topic(settings: Settings) -> None:
    async with Client(settings) as client:
        first = Result("job-1", "failed", 1, "w")
        await _write(
            settings, first, Result("job-2", "completed", 1, "w"), Result("job-1", "completed", 2, "w")
        )
        found = await read_results(client.config, ["job-1", "job-3"])
        assert {job_id: result.attempt for job_id, result in found.items()} == {"job-1": 2}
        both = await asyncio.gather(client.lookup.find("job-1"), client.lookup.find("job-2"))
        assert [result.attempt if result else None for result in both] == [2, 1]


async def test_what_redis_remembers_of_a_job(settings: Settings) -> None:
    redis = Redis.from_url(settings.redis_url)
    try:
        assert await seen_before(redis, "tailrace", "job-1", b"{}") is Seen.NEVER
        digest = fingerprint(b"{}")
        await redis.hset(keys_of("job-1").meta, "digest", digest)
        assert await seen_before(redis, "tailrace", "job-1", b"{}") is Seen.RUNNING
        assert await seen_before(redis, "tailrace", "job-1", b"{ }") is Seen.OTHER_JOB
        await redis.hset(keys_of("job-1").meta, "ended", "completed")
        assert await seen_before(redis, "tailrace", "job-1", b"{}") is Seen.ENDED
    finally:
        await redis.aclose()
