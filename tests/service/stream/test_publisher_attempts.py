"""What the next attempt at a job finds, and which jobs it does not take over."""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from service.stream.publisher import Outcome
from service.wire.event import Start
from tests.service.stream.one_job import JOB, assembled, begin, write
from tests.support.redis import RedisServer
from tests.support.streams import (
    COMPLETED,
    FAST,
    keys_of,
    log_events,
    open_job,
    open_stream,
    running_publisher,
    stream_of,
)

pytestmark = pytest.mark.redis


async def test_a_redelivered_job_continues_from_the_log(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis:
        async with running_publisher(redis_server.url) as first:
            begun = await begin(first, "ab", (1, 2))
        async with running_publisher(redis_server.url) as second:
            opened = await open_job(second, JOB)
            assert (opened.attempts, opened.epoch) == (2, stream_of(opened).epoch)
            assert opened.epoch > begun.epoch
            assert (opened.resumed[0].token_ids, opened.resumed[0].text) == ((1, 2), "ab")
            stream = stream_of(opened)
            stream.start()
            stream.delta(0, "c", (3,))
        async with running_publisher(redis_server.url) as third:
            opened = await open_job(third, JOB)
            assert (opened.attempts, opened.resumed[0].token_ids) == (3, (1, 2, 3))
            assert opened.epoch > stream.epoch
            stream = stream_of(opened)
            stream.start()
            assert await stream.end(COMPLETED)
        events = await log_events(redis, JOB)
        assert [event.attempt for event in events if isinstance(event, Start)] == [1, 2, 3]
        assembler = assembled(events)
        assert assembler.problems() == []
        assert assembler.texts() == ["abc"]


async def test_an_attempt_that_cannot_continue_starts_the_text_over(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis, running_publisher(redis_server.url) as publisher:
        await begin(publisher, "old", (1, 2))
        stream = await open_stream(publisher, JOB)
        stream.restart()
        stream.delta(0, "new", (3,))
        assert await stream.end(COMPLETED)
        assembler = assembled(await log_events(redis, JOB))
        assert assembler.problems() == []
        assert assembler.texts() == ["new"]


async def test_a_long_log_is_read_back_page_by_page(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as first, running_publisher(redis_server.url) as second:
        stream = await open_stream(first, JOB, num_choices=16)
        stream.start()
        for token in range(80):
            for index in range(16):
                stream.delta(index, "x", (token,))
            await stream.flushed()
        resumed = (await open_job(second, JOB, num_choices=16)).resumed
        assert {choice.token_ids for choice in resumed} == {tuple(range(80))}


async def test_nothing_is_resumed_from_a_trimmed_log(redis_server: RedisServer) -> None:
    config = replace(FAST, stream_max_events=64)
    async with running_publisher(redis_server.url, config) as first:
        await write(await open_stream(first, JOB), range(400), text="x")
        async with Redis.from_url(redis_server.url) as redis:
            assert await redis.xlen(keys_of(JOB).log) < 200, "the log is bounded"
    async with running_publisher(redis_server.url) as second:
        assert (await open_job(second, JOB)).resumed[0].token_ids == ()


async def test_abandoning_writes_nothing_more_and_leaves_the_log_to_the_next_attempt(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        stream = await begin(publisher)
        stream.delta(0, "b", (2,))
        stream.abandon()
        assert not await stream.flushed()
        assert not stream.delta(0, "c", (3,))
        assert (await open_job(publisher, JOB)).resumed[0].token_ids == (1,)


async def test_only_attempts_without_a_token_that_were_not_handed_back_count_as_without_progress(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        counts, numbers = [], []
        for ending in ("crash", "crash", "token", "hand back", "hand back", "crash", "crash"):
            opened = await open_job(publisher, JOB)
            counts.append(opened.attempts_without_progress)
            numbers.append(opened.attempts)
            stream = stream_of(opened)
            stream.start()
            if ending == "token":
                stream.delta(0, "x", (1,))
                assert await stream.flushed()
            elif ending == "hand back":
                stream.abandon()
    assert counts == [1, 2, 3, 1, 1, 1, 2]
    assert numbers == [1, 2, 3, 4, 5, 6, 7]


async def test_an_ended_job_is_suppressed_and_another_record_with_its_id_is_a_duplicate(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        stream = await open_stream(publisher, JOB)
        other = await open_job(publisher, JOB, origin="jobs/0/8")
        assert (other.outcome, other.fate, other.same_content) == (Outcome.DUPLICATE, None, True)
        changed = await open_job(publisher, JOB, digest="cd" * 32)
        assert (changed.outcome, changed.same_content) == (Outcome.DUPLICATE, False)
        assert await stream.end(COMPLETED), "the duplicates changed nothing"
        again = await open_job(publisher, JOB)
        assert (again.outcome, again.epoch, again.fate) == (Outcome.ENDED, stream.epoch, "completed")
