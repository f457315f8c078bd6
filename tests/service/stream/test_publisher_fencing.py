"""Two attempts that write at the same time: the older one is fenced."""

import pytest
from redis.asyncio import Redis

from service.stream.keys import APPEND, FENCE, Script, append_script
from service.stream.publisher import Outcome
from service.wire.event import Event
from tests.service.stream.one_job import JOB, begin
from tests.support.redis import RedisServer
from tests.support.streams import COMPLETED, keys_of, log_events, open_job, open_stream, running_publisher

pytestmark = pytest.mark.redis


async def two_attempts(
    url: str, append: Script
) -> tuple[list[Event], tuple[int, int], list[bool], list[tuple[str, int]]]:
    """The old attempt continues to write after the new one has started, as after a rebalance.

    The log, both epochs, what the old one was answered and what it was told.
    """
    fenced: list[tuple[str, int]] = []
    async with (
        running_publisher(
            url, append=append, on_fenced=lambda job_id, epoch: fenced.append((job_id, epoch))
        ) as old_worker,
        running_publisher(url, append=append) as new_worker,
    ):
        old = await begin(old_worker)
        new = await open_stream(new_worker, JOB)
        new.start()
        await new.flushed()
        old.delta(0, "zombie", (2,))
        answers = [await old.flushed(), await old.end(COMPLETED)]
        if old.closed:
            answers.append(old.delta(0, "z", (3,)))
        async with Redis.from_url(url) as redis:
            return await log_events(redis, JOB), (old.epoch, new.epoch), answers, fenced


async def test_two_producers_for_one_stream_after_a_failover_the_older_is_fenced(
    redis_server: RedisServer,
) -> None:
    events, (old, new), answers, fenced = await two_attempts(redis_server.url, APPEND)
    assert [event.epoch for event in events] == [old, old, new]
    assert answers == [False, False, False]
    assert fenced == [(JOB, old)]


async def test_control_without_the_comparison_the_older_attempt_writes(redis_server: RedisServer) -> None:
    open_fence = FENCE.split("if held_epoch")[0]
    events, (old, new), answers, fenced = await two_attempts(redis_server.url, append_script(open_fence))
    assert [event.epoch for event in events][:4] == [old, old, new, old]
    assert (answers[:2], fenced) == ([True, True], [])


async def test_an_epoch_never_repeats_even_after_redis_lost_its_memory(
    redis_server: RedisServer,
) -> None:
    epochs = []
    async with running_publisher(redis_server.url) as publisher:
        for _ in range(4):
            epochs += [(await open_job(publisher, JOB)).epoch, (await open_job(publisher, JOB)).epoch]
            redis_server.flush()
    assert epochs == sorted(set(epochs))


async def test_an_epoch_grows_even_if_the_servers_clock_was_set_back(redis_server: RedisServer) -> None:
    ahead = 8_000_000_000_000_000
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        assert (await open_job(publisher, JOB)).epoch < ahead
        await redis.hset(keys_of(JOB).meta, "epoch", str(ahead))
        assert [(await open_job(publisher, JOB)).epoch for _ in range(2)] == [ahead + 1, ahead + 2]


async def test_an_attempt_that_redis_forgot_cannot_write_over_the_next_one(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as old_worker,
        running_publisher(redis_server.url) as new_worker,
        Redis.from_url(redis_server.url) as redis,
    ):
        old = await begin(old_worker)
        redis_server.flush()
        new = await open_stream(new_worker, JOB)
        old.delta(0, "zombie", (2,))
        assert not await old.flushed()
        assert await new.end(COMPLETED)
        assert {event.epoch for event in await log_events(redis, JOB)} == {new.epoch}


async def test_two_attempts_with_one_epoch_after_a_clock_set_back_are_distinguished(
    redis_server: RedisServer,
) -> None:
    """Redis lost its memory and its clock jumped back to the very microsecond: meta names the later attempt."""
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        old = await begin(publisher)
        await redis.hset(keys_of(JOB).meta, "writer", "of another attempt with this epoch")
        old.delta(0, "zombie", (2,))
        assert not await old.flushed()
        assert len(await log_events(redis, JOB)) == 2


async def test_the_newer_attempt_wins_even_if_the_older_writes_first_into_an_empty_redis(
    redis_server: RedisServer,
) -> None:
    async with (
        running_publisher(redis_server.url) as old_worker,
        running_publisher(redis_server.url) as new_worker,
    ):
        old = await open_stream(old_worker, JOB)
        new = await open_stream(new_worker, JOB)
        redis_server.flush()
        old.start()
        assert await old.flushed()
        new.start()
        assert await new.flushed()
        old.delta(0, "zombie", (1,))
        assert not await old.flushed()


async def test_a_job_without_a_stream_is_fenced_and_suppressed_too(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as old_worker,
        running_publisher(redis_server.url) as new_worker,
    ):
        old = await open_stream(old_worker, JOB, stream=False)
        new = await open_stream(new_worker, JOB, stream=False)
        assert not await old.end(COMPLETED)
        assert await new.end(COMPLETED)
        assert (await open_job(old_worker, JOB, stream=False)).outcome is Outcome.ENDED
        async with Redis.from_url(redis_server.url) as redis:
            assert await redis.exists(keys_of(JOB).log) == 0
