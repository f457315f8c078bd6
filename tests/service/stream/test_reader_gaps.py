"""Events that a reader cannot have: a Redis that forgot, a trimmed log, a lost message. Told, never skipped."""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from service.stream.keys import JobKeys
from service.stream.reader import Gap
from service.wire.event import Delta, Event, Start, encode_event
from tests.service.stream.one_job import JOB, begin_and_follow, seen, words, write
from tests.support.redis import RedisServer
from tests.support.streams import COMPLETED, FAST, Followed, open_job, running_publisher

pytestmark = pytest.mark.redis


async def test_a_redis_that_lost_its_memory_is_a_gap_for_the_late_and_none_for_those_who_had_read(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        early = await begin_and_follow(publisher, redis, 5)
        redis_server.stop()
        redis_server.start()
        publisher.delta(JOB, 1, 0, "5 ", (5,))
        assert await publisher.flushed(JOB, 1)
        late = Followed(redis, JOB)
        await late.until(seen(1))
        await publisher.end(JOB, 1, COMPLETED)
        assert (await early.verdict()).complete
        assert early.gaps == []
        verdict = await late.verdict()
        assert late.gaps == [Gap((0, 0), (1, 6))]
        assert verdict.status == "completed"
        assert not verdict.complete


async def test_a_log_that_begins_anew_voids_what_was_read(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as old,
        running_publisher(redis_server.url) as new,
        Redis.from_url(redis_server.url) as redis,
    ):
        followed = await begin_and_follow(old, redis, 9)
        old.abandon(JOB, 1)
        redis_server.stop()
        redis_server.start()
        assert (await open_job(new, JOB)).epoch == 1, "Redis knows of no earlier attempt"
        new.start(JOB, 1)
        await write(new, range(2))
        await new.end(JOB, 1, COMPLETED)
        verdict = await followed.verdict()
        assert followed.gaps[0].restarted
        assert followed.assembler.texts() == [words(2)]
        assert verdict.complete


async def test_a_trimmed_log_is_a_gap_told_and_not_skipped(redis_server: RedisServer) -> None:
    config = replace(FAST, max_log_entries=64)
    async with (
        running_publisher(redis_server.url, config) as publisher,
        Redis.from_url(redis_server.url) as redis,
    ):
        await open_job(publisher, JOB)
        publisher.start(JOB, 1)
        await write(publisher, range(300))
        await publisher.end(JOB, 1, COMPLETED)
        followed = Followed(redis, JOB)
        verdict = await followed.verdict()
        (gap,) = followed.gaps
        assert gap.expected == (0, 0)
        assert gap.found == (1, followed.events[0].seq)
        assert "events are missing" in verdict.problems


async def test_a_message_lost_on_the_channel_is_healed_from_the_log_or_told(
    redis_server: RedisServer,
) -> None:
    keys = JobKeys.of(JOB)
    async with Redis.from_url(redis_server.url) as redis:
        followed = Followed(redis, JOB)

        async def emit(event: Event, *, logged: bool = True, published: bool = True) -> None:
            if logged:
                await redis.xadd(keys.log, {"event": encode_event(event)})
            if published:
                await redis.publish(keys.live, encode_event(event))

        await emit(Start(JOB, 1, (0,)))
        await followed.until(seen(1))
        await emit(Delta(JOB, 1, 1, 0, "a", (1,)), published=False)
        await emit(Delta(JOB, 1, 2, 0, "b", (2,)))
        await followed.until(seen(3))
        assert followed.gaps == []
        assert followed.assembler.texts() == ["ab"]
        await emit(Delta(JOB, 1, 3, 0, "c", (3,)), logged=False, published=False)
        await emit(Delta(JOB, 1, 4, 0, "d", (4,)), logged=False)
        await followed.until(seen(4))
        assert followed.gaps == [Gap((1, 3), (1, 4))]
        await followed.leave()
