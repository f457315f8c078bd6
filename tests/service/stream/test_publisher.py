"""The publisher against a real Redis: a job's stream from start to end, and how jobs affect each other."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from service.errors import DependencyError, JobError
from service.stream.publisher import Outcome, StreamPublisher
from tests.service.stream.one_job import JOB, assembled
from tests.support.proxy import running_proxy
from tests.support.redis import RedisServer
from tests.support.streams import (
    COMPLETED,
    DIGEST,
    FAST,
    eventually,
    keys_of,
    log_events,
    open_job,
    open_stream,
    running_publisher,
    stream_of,
)

pytestmark = pytest.mark.redis


def time_us(reply: tuple[int, int]) -> int:
    return reply[0] * 1_000_000 + reply[1]


async def test_a_stream_from_start_to_end(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis, running_publisher(redis_server.url) as publisher:
        before_us = time_us(await redis.time())
        opened = await open_job(publisher, JOB, num_choices=2)
        after_us = time_us(await redis.time())
        assert (opened.outcome, opened.attempts, opened.cancelled) == (Outcome.OPENED, 1, False)
        assert before_us <= opened.epoch <= after_us
        assert before_us // 1_000 <= opened.began_ms <= after_us // 1_000
        stream = stream_of(opened)
        stream.start()
        for i in range(5):
            assert stream.delta(i % 2, f"{i} ", (i,))
        assert await stream.flushed()
        assert await stream.end(COMPLETED)
        events = await log_events(redis, JOB)
        assert {event.epoch for event in events} == {opened.epoch}
        assembler = assembled(events)
        assert assembler.problems() == []
        assert assembler.texts() == ["0 2 4 ", "1 3 "]
        assert (
            publisher.stats().open_jobs,
            publisher.stats().backlog_jobs,
            publisher.stats().backlog_bytes,
        ) == (0, 0, 0)
        for key in (keys_of(JOB).log, keys_of(JOB).meta):
            assert 0 < await redis.ttl(key) <= FAST.stream_ttl_s


async def test_a_step_of_all_jobs_is_one_round_trip(redis_server: RedisServer) -> None:
    async with running_proxy(redis_server.port) as proxy, running_publisher(proxy.url) as publisher:
        ids = [f"job-{i}" for i in range(32)]
        streams = await asyncio.gather(*(open_stream(publisher, job_id) for job_id in ids))
        before = publisher.stats().round_trips
        for stream in streams:
            stream.start()
            stream.delta(0, "x", (1,))
        assert all(await asyncio.gather(*(stream.flushed() for stream in streams)))
        assert publisher.stats().round_trips == before + 1


async def test_a_foreign_key_costs_one_job_its_stream_and_affects_no_other_job(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        await redis.set(keys_of("bad-meta").meta, "not a hash")
        with pytest.raises(JobError, match="bad-meta"):
            await open_job(publisher, "bad-meta")
        bad, good = [await open_stream(publisher, job_id) for job_id in ("bad-log", "good")]
        await redis.set(keys_of("bad-log").log, "not a stream")
        for stream in (bad, good):
            stream.start()
        assert await bad.flushed(), "what can never be written is not waited for"
        assert await good.flushed()
        # Its job goes on and ends, though nobody can follow it.
        bad.delta(0, "x", (1,))
        assert await bad.flushed()
        assert await bad.decide(b"record")
        assert await bad.end(COMPLETED)
        assert not bad.fenced
        assert publisher.stats().open_jobs == 1
        assert publisher.healthy


@pytest.mark.parametrize(
    "junk",
    [
        {"epoch": "abc"},
        {"epoch": "nan"},
        {"epoch": "1e300"},
        {"attempts": "abc"},
        {"attempts": str(2**63 - 1)},
        {"attempts_without_progress": "1.5"},
        {"began_ms": "abc"},
    ],
    ids=str,
)
async def test_hazard_junk_in_one_jobs_meta_is_a_conflict_of_that_job_and_no_outage(
    redis_server: RedisServer, junk: dict[str, str]
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        meta: Any = {"epoch": "1", "origin": "jobs/0/7", "digest": DIGEST}
        await redis.hset(keys_of("junk").meta, mapping=meta | junk)
        with pytest.raises(JobError, match="junk") as caught:
            async with asyncio.timeout(5):
                await open_job(publisher, "junk")
        assert publisher.stats().failures == 0
        assert (await open_job(publisher, "good")).outcome is Outcome.OPENED
    assert caught.value.code == "stream_conflict"


async def test_hazard_a_log_that_takes_no_more_entries_costs_one_job_its_stream(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        stream = await open_stream(publisher, JOB)
        await redis.xadd(keys_of(JOB).log, {"foreign": "x"}, id=f"{2**64 - 1}-{2**64 - 1}")
        stream.start()
        assert await asyncio.wait_for(stream.flushed(), 5), "what can never be written is not waited for"
        assert publisher.stats().failures == 0


async def test_unwritten_events_raise_when_the_publisher_stops(
    redis_server: RedisServer,
) -> None:
    redis_server.stop()
    publisher = StreamPublisher(replace(FAST, redis_url=redis_server.url))
    running = asyncio.create_task(publisher.run())
    opening = asyncio.create_task(open_job(publisher, JOB))
    await eventually(lambda: publisher.stats().failures > 1, "Redis is away")
    publisher.stop()
    async with asyncio.timeout(5):
        await running
    with pytest.raises(DependencyError):
        await opening
    with pytest.raises(DependencyError):
        await open_job(publisher, JOB)
