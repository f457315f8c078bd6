"""The publisher through a proxy that stalls and cuts: no event is lost or doubled, and no reply reaches the wrong
caller."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from service.stream.keys import APPEND, Script
from service.wire.event import Event
from tests.service.stream.one_job import JOB, assembled
from tests.support.proxy import Direction, running_proxy
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
)

pytestmark = pytest.mark.redis


async def cut_the_answer_to_the_first_write(redis_server: RedisServer, append: Script) -> list[Event]:
    async with (
        running_proxy(redis_server.port) as proxy,
        running_publisher(proxy.url, append=append) as publisher,
    ):
        stream = await open_stream(publisher, JOB)

        def cut(direction: Direction, chunk: bytes) -> None:
            if direction == "to_client":
                proxy.on_chunk = None
                proxy.cut()
                proxy.stall(direction)

        proxy.on_chunk = cut
        stream.start()
        stream.delta(0, "a", (1,))
        await eventually(lambda: proxy.on_chunk is None, "the answer to the write was cut off")
        stream.delta(0, "b", (2,))
        proxy.resume()
        assert await stream.flushed()
        assert await stream.end(COMPLETED)
        assert proxy.num_connections >= 2
        async with Redis.from_url(redis_server.url) as redis:
            return await log_events(redis, JOB)


async def test_a_write_with_unknown_outcome_is_sent_again_and_appears_once(redis_server: RedisServer) -> None:
    assembler = assembled(await cut_the_answer_to_the_first_write(redis_server, APPEND))
    assert assembler.problems() == []
    assert assembler.texts() == ["ab"]


async def test_control_without_comparing_seq_the_resent_events_appear_twice(
    redis_server: RedisServer,
) -> None:
    source = APPEND.source.decode()
    forgetful = Script.of(source.replace("tonumber(held[3] or 0)", "first"))
    assert forgetful.sha != APPEND.sha
    events = await cut_the_answer_to_the_first_write(redis_server, forgetful)
    assert max(Counter(event.seq for event in events).values()) == 2


async def test_a_slow_redis_makes_deltas_merge_without_delay_or_growing_memory(
    redis_server: RedisServer,
) -> None:
    async with running_proxy(redis_server.port) as proxy, running_publisher(proxy.url) as publisher:
        ids = [f"job-{i}" for i in range(4)]
        streams = [await open_stream(publisher, job_id) for job_id in ids]
        for stream in streams:
            stream.start()
        await asyncio.gather(*(stream.flushed() for stream in streams))
        assert publisher.healthy
        proxy.stall("to_client")
        trips = publisher.stats().round_trips
        for token in range(500):
            for stream in streams:
                assert stream.delta(0, "x", (token,))
            if token == 0:
                await eventually(lambda: not publisher.healthy, "a stalled round trip is reported")
        assert publisher.stats().round_trips == trips
        assert publisher.stats().backlog_jobs == 4
        assert 0 < publisher.stats().backlog_bytes < 100_000
        proxy.resume()
        assert all(await asyncio.gather(*(stream.flushed() for stream in streams)))
        assert publisher.healthy
        async with Redis.from_url(redis_server.url) as redis:
            for job_id in ids:
                events = await log_events(redis, job_id)
                assert len(events) <= 4, "499 steps were merged"
                assert assembled(events, job_id).choice(0).token_ids == list(range(500))


async def test_a_redis_that_does_not_answer_is_abandoned_and_asked_again(redis_server: RedisServer) -> None:
    config = replace(FAST, command_timeout_s=0.1)
    async with running_proxy(redis_server.port) as proxy, running_publisher(proxy.url, config) as publisher:
        stream = await open_stream(publisher, JOB)
        proxy.stall("to_client")
        stream.start()
        connections = proxy.num_connections
        await eventually(lambda: proxy.num_connections > connections, "it connects anew")
        assert not publisher.healthy
        proxy.resume()
        assert await stream.flushed()
        async with Redis.from_url(redis_server.url) as redis:
            assert len(await log_events(redis, JOB)) == 1


async def test_a_cancelled_command_never_hands_its_reply_to_the_next_caller(
    redis_server: RedisServer,
) -> None:
    num_jobs = 60
    # Above every clock, so that each job's next one is told from all others.
    epochs = [8_000_000_000_000_000 + 1_000 * i for i in range(num_jobs)]
    async with Redis.from_url(redis_server.url) as redis:
        for i in range(num_jobs):
            fields: Any = {
                "epoch": epochs[i],
                "origin": "jobs/0/7",
                "digest": DIGEST,
            }
            await redis.hset(keys_of(f"job-{i}").meta, mapping=fields)
    async with running_proxy(redis_server.port) as proxy, running_publisher(proxy.url) as publisher:
        await open_job(publisher, "warm")
        for round_no in range(3):
            proxy.stall("to_client")
            tasks = [asyncio.create_task(open_job(publisher, f"job-{i}")) for i in range(num_jobs)]
            await proxy.passed("to_server", 1)
            for task in tasks[round_no::3]:
                task.cancel()
            proxy.resume()
            replies = await asyncio.gather(*tasks, return_exceptions=True)
            for i, reply in enumerate(replies):
                if i % 3 == round_no:
                    assert isinstance(reply, asyncio.CancelledError)
                else:
                    assert not isinstance(reply, BaseException)
                    assert reply.epoch == epochs[i] + 1 + round_no
        assert proxy.num_connections == 1, "no command was broken off"
