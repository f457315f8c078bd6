"""Two attempts that write at the same time: the older one is fenced (G5)."""

import pytest
from redis.asyncio import Redis

from service.stream.keys import JobKeys
from service.stream.publisher import Outcome
from service.stream.scripts import APPEND, FENCE, Script, append_script
from service.wire.event import Event
from tests.service.stream.one_job import JOB, begin
from tests.support.redis import RedisServer
from tests.support.streams import COMPLETED, log_events, open_job, running_publisher

pytestmark = pytest.mark.redis


async def two_attempts(url: str, append: Script) -> tuple[list[Event], list[bool], list[tuple[str, int]]]:
    """The old attempt goes on writing after the new one has started, as after a rebalance."""
    fenced: list[tuple[str, int]] = []
    async with (
        running_publisher(
            url, append=append, on_fenced=lambda job_id, epoch: fenced.append((job_id, epoch))
        ) as old,
        running_publisher(url, append=append) as new,
    ):
        await begin(old)
        await open_job(new, JOB)
        new.start(JOB, 2)
        await new.flushed(JOB, 2)
        old.delta(JOB, 1, 0, "zombie", (2,))
        answers = [
            await old.flushed(JOB, 1),
            await old.end(JOB, 1, COMPLETED),
            old.delta(JOB, 1, 0, "z", (3,)),
        ]
        async with Redis.from_url(url) as redis:
            return await log_events(redis, JOB), answers, fenced


async def test_two_producers_for_one_stream_after_a_failover_the_older_is_fenced(
    redis_server: RedisServer,
) -> None:
    events, answers, fenced = await two_attempts(redis_server.url, APPEND)
    assert [event.epoch for event in events] == [1, 1, 2]
    assert answers == [False, False, False]
    assert fenced == [(JOB, 1)]


async def test_control_without_the_comparison_the_older_attempt_writes(redis_server: RedisServer) -> None:
    open_fence = FENCE.split("if held_epoch")[0]
    events, _, _ = await two_attempts(redis_server.url, append_script(open_fence))
    assert [event.epoch for event in events][:4] == [1, 1, 2, 1]


async def test_two_attempts_with_one_epoch_after_redis_lost_its_memory_are_told_apart(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as old, running_publisher(redis_server.url) as new:
        await open_job(old, JOB)
        redis_server.flush()
        assert (await open_job(new, JOB)).epoch == 1
        old.start(JOB, 1)
        assert not await old.flushed(JOB, 1)
        new.start(JOB, 1)
        assert await new.flushed(JOB, 1)


async def test_the_newer_attempt_wins_even_if_the_older_writes_first_into_an_empty_redis(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as old, running_publisher(redis_server.url) as new:
        await open_job(old, JOB)
        assert (await open_job(new, JOB)).epoch == 2
        redis_server.flush()
        old.start(JOB, 1)
        assert await old.flushed(JOB, 1)
        new.start(JOB, 2)
        assert await new.flushed(JOB, 2)
        old.delta(JOB, 1, 0, "zombie", (1,))
        assert not await old.flushed(JOB, 1)


async def test_a_job_without_a_stream_is_fenced_and_suppressed_too(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as old, running_publisher(redis_server.url) as new:
        await open_job(old, JOB, stream=False)
        await open_job(new, JOB, stream=False)
        assert not await old.end(JOB, 1, COMPLETED)
        assert await new.end(JOB, 2, COMPLETED)
        assert (await open_job(old, JOB, stream=False)).outcome is Outcome.ENDED
        async with Redis.from_url(redis_server.url) as redis:
            assert await redis.exists(JobKeys.of(JOB).log) == 0
