"""The publisher against a real Redis: a job's stream from its start to its end, and what one job may cost another."""

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from service.errors import DependencyError, JobError
from service.stream.keys import JobKeys
from service.stream.publisher import Outcome, StreamPublisher
from tests.service.stream.one_job import JOB, assembled
from tests.support.proxy import running_proxy
from tests.support.redis import RedisServer
from tests.support.streams import COMPLETED, FAST, eventually, log_events, open_job, running_publisher

pytestmark = pytest.mark.redis


async def test_a_stream_from_start_to_end(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis, running_publisher(redis_server.url) as publisher:
        opened = await open_job(publisher, JOB, num_choices=2)
        assert (opened.outcome, opened.epoch, opened.cancelled) == (Outcome.OPENED, 1, False)
        publisher.start(JOB, 1, attempt=3)
        for i in range(5):
            assert publisher.delta(JOB, 1, i % 2, f"{i} ", (i,))
        assert await publisher.flushed(JOB, 1)
        assert await publisher.end(JOB, 1, COMPLETED)
        assembler = assembled(await log_events(redis, JOB))
        assert assembler.problems() == []
        assert assembler.texts() == ["0 2 4 ", "1 3 "]
        assert (publisher.num_open_jobs, publisher.backlog_jobs, publisher.backlog_bytes) == (0, 0, 0)
        for key in (JobKeys.of(JOB).log, JobKeys.of(JOB).meta):
            assert 0 < await redis.ttl(key) <= FAST.ttl_s


async def test_python_is_the_limit_so_a_step_of_all_jobs_is_one_round_trip(redis_server: RedisServer) -> None:
    async with running_proxy(redis_server.port) as proxy, running_publisher(proxy.url) as publisher:
        ids = [f"job-{i}" for i in range(32)]
        await asyncio.gather(*(open_job(publisher, job_id) for job_id in ids))
        before = publisher.num_round_trips
        for job_id in ids:
            publisher.start(job_id, 1)
            publisher.delta(job_id, 1, 0, "x", (1,))
        assert all(await asyncio.gather(*(publisher.flushed(job_id, 1) for job_id in ids)))
        assert publisher.num_round_trips == before + 1


async def test_a_foreign_key_costs_one_job_its_stream_and_its_neighbours_nothing(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        await redis.set(JobKeys.of("bad-meta").meta, "not a hash")
        with pytest.raises(JobError, match="bad-meta"):
            await open_job(publisher, "bad-meta")
        for job_id in ("bad-log", "good"):
            await open_job(publisher, job_id)
        await redis.set(JobKeys.of("bad-log").log, "not a stream")
        for job_id in ("bad-log", "good"):
            publisher.start(job_id, 1)
        assert await publisher.flushed("bad-log", 1), "nobody waits for what can never be written"
        assert await publisher.flushed("good", 1)
        # Its job goes on and ends, though nobody can follow it.
        assert publisher.delta("bad-log", 1, 0, "x", (1,))
        assert await publisher.flushed("bad-log", 1)
        assert await publisher.end("bad-log", 1, COMPLETED)
        assert publisher.num_open_jobs == 1
        assert publisher.healthy


async def test_a_meta_without_a_number_for_epoch_is_a_conflict_of_that_job(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        await redis.hset(JobKeys.of("junk").meta, mapping={"epoch": "abc"})
        with pytest.raises(JobError, match="junk") as caught:
            await open_job(publisher, "junk")
    assert caught.value.code == "stream_conflict"


async def test_what_is_not_written_when_the_publisher_stops_is_raised_and_not_passed_over(
    redis_server: RedisServer,
) -> None:
    redis_server.stop()
    publisher = StreamPublisher(replace(FAST, url=redis_server.url))
    running = asyncio.create_task(publisher.run())
    opening = asyncio.create_task(open_job(publisher, JOB))
    await eventually(lambda: publisher.num_failures > 1, "Redis is away")
    publisher.stop()
    async with asyncio.timeout(5):
        await running
    with pytest.raises(DependencyError):
        await opening
    with pytest.raises(DependencyError):
        await open_job(publisher, JOB)
