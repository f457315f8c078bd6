"""Events that a reader cannot have: a Redis that forgot, a trimmed log, a lost message. They are reported, never
skipped."""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from service.errors import InternalError
from service.stream.reader import Gap, read_stream
from service.wire.event import Delta, Event, Start, encode_event
from tests.service.stream.one_job import JOB, begin_and_follow, seen, write
from tests.support.redis import RedisServer
from tests.support.streams import (
    COMPLETED,
    FAST,
    Followed,
    keys_of,
    open_job,
    open_stream,
    running_publisher,
    stream_of,
)

pytestmark = pytest.mark.redis


async def test_lost_memory_is_a_gap_for_late_readers_and_none_for_readers_that_were_up_to_date(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        stream, early = await begin_and_follow(publisher, redis, 5)
        redis_server.stop()
        redis_server.start()
        await write(stream, range(5, 6))
        late = Followed(redis, JOB)
        await late.until(seen(1))
        await stream.end(COMPLETED)
        assert (await early.verdict()).complete
        assert early.gaps == []
        verdict = await late.verdict()
        assert late.gaps == [Gap((0, 0), (stream.epoch, 6))]
        assert verdict.status == "completed"
        assert not verdict.complete


async def test_a_log_that_starts_over_resets_the_reader(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as old,
        running_publisher(redis_server.url) as new,
        Redis.from_url(redis_server.url) as redis,
    ):
        stream, followed = await begin_and_follow(old, redis, 9)
        stream.abandon()
        redis_server.stop()
        redis_server.start()
        opened = await open_job(new, JOB)
        assert opened.attempts == 1, "Redis knows of no earlier attempt"
        assert opened.epoch > stream.epoch
        stream = stream_of(opened)
        stream.start()
        await write(stream, range(2), text="anew ")
        await stream.end(COMPLETED)
        verdict = await followed.verdict()
        assert followed.assembler.texts() == ["anew anew "]
        assert followed.gaps == []
        assert verdict.complete


async def test_a_log_that_starts_over_at_a_lower_epoch_resets_the_reader(redis_server: RedisServer) -> None:
    """Redis forgot, and its clock was set back meanwhile."""
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        stream, followed = await begin_and_follow(publisher, redis, 9)
        stream.abandon()
        redis_server.flush()
        lower = stream.epoch - 1
        anew: list[Event] = [Start(JOB, lower, (0,)), Delta(JOB, lower, 1, 0, "anew", (1,))]
        for event in anew:
            await redis.xadd(keys_of(JOB).log, {"event": encode_event(event)})
        await redis.client_kill_filter(_type="pubsub")
        await followed.until(lambda reader: reader.assembler.texts() == ["anew"])
        assert followed.gaps == [Gap((stream.epoch, 10), (lower, 0), restarted=True)]
        await followed.leave()


async def test_a_trimmed_log_is_reported_as_a_gap(redis_server: RedisServer) -> None:
    config = replace(FAST, stream_max_events=64)
    async with (
        running_publisher(redis_server.url, config) as publisher,
        Redis.from_url(redis_server.url) as redis,
    ):
        stream = await open_stream(publisher, JOB)
        await write(stream, range(300))
        await stream.end(COMPLETED)
        followed = Followed(redis, JOB)
        verdict = await followed.verdict()
        (gap,) = followed.gaps
        assert gap.expected == (0, 0)
        assert gap.found == (stream.epoch, followed.events[0].seq)
        assert "events are missing" in verdict.problems


async def test_a_message_lost_on_the_channel_is_read_from_the_log_or_reported(
    redis_server: RedisServer,
) -> None:
    keys = keys_of(JOB)
    async with Redis.from_url(redis_server.url) as redis, Followed(redis, JOB) as followed:

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


async def test_hazard_a_log_ahead_of_the_channel_was_taken_for_one_that_starts_over(
    redis_server: RedisServer,
) -> None:
    """The reader reads the log for an event, and finds there what the channel brings next."""
    keys = keys_of(JOB)
    first: list[Event] = [Start(JOB, 1, (0,)), Delta(JOB, 1, 1, 0, "a", (1,))]
    second: list[Event] = [Start(JOB, 2, (1,)), *(Delta(JOB, 2, seq, 0, "b", (2,)) for seq in range(1, 5))]
    async with Redis.from_url(redis_server.url) as redis, Followed(redis, JOB) as followed:
        for event in first:
            await redis.xadd(keys.log, {"event": encode_event(event)})
        await redis.publish(keys.live, encode_event(first[1]))
        await followed.until(seen(2))
        for event in second:
            await redis.xadd(keys.log, {"event": encode_event(event)})
        for event in second[:1] + second[2:]:  # one message is lost on the way
            await redis.publish(keys.live, encode_event(event))
        await followed.until(seen(7))
        assert followed.gaps == []
        assert followed.events == [*first, *second]


async def test_a_log_entry_without_an_event_is_an_error_that_says_so(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis:
        await redis.xadd(keys_of(JOB).log, {"other": "x"})
        with pytest.raises(InternalError, match="no field 'event'"):
            await anext(read_stream(redis, JOB, config=FAST))
