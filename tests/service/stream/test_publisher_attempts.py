"""Taking over: what the next attempt at a job finds, and which jobs it leaves alone."""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from service.stream.keys import JobKeys
from service.stream.publisher import Outcome
from tests.service.stream.one_job import JOB, assembled, begin
from tests.support.redis import RedisServer
from tests.support.streams import COMPLETED, FAST, log_events, open_job, running_publisher

pytestmark = pytest.mark.redis


async def test_a_redelivered_job_continues_from_the_log(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis:
        async with running_publisher(redis_server.url) as first:
            await begin(first, "ab", (1, 2))
        async with running_publisher(redis_server.url) as second:
            opened = await open_job(second, JOB)
            assert opened.epoch == 2
            assert (opened.resumed[0].token_ids, opened.resumed[0].text) == ((1, 2), "ab")
            second.start(JOB, 2)
            second.delta(JOB, 2, 0, "c", (3,))
        async with running_publisher(redis_server.url) as third:
            opened = await open_job(third, JOB)
            assert (opened.epoch, opened.resumed[0].token_ids) == (3, (1, 2, 3))
            third.start(JOB, 3)
            assert await third.end(JOB, 3, COMPLETED)
        assembler = assembled(await log_events(redis, JOB))
        assert assembler.problems() == []
        assert assembler.texts() == ["abc"]


async def test_an_attempt_that_cannot_continue_begins_the_text_anew(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis, running_publisher(redis_server.url) as publisher:
        await open_job(publisher, JOB)
        publisher.delta(JOB, 1, 0, "old", (1, 2))
        await publisher.flushed(JOB, 1)
        await open_job(publisher, JOB)
        publisher.restart(JOB, 2)
        publisher.delta(JOB, 2, 0, "new", (3,))
        assert await publisher.end(JOB, 2, COMPLETED)
        assembler = assembled(await log_events(redis, JOB))
        assert assembler.problems() == []
        assert assembler.texts() == ["new"]


async def test_a_long_log_is_read_back_page_by_page(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as first, running_publisher(redis_server.url) as second:
        await open_job(first, JOB, num_choices=16)
        first.start(JOB, 1)
        for token in range(80):
            for index in range(16):
                first.delta(JOB, 1, index, "x", (token,))
            await first.flushed(JOB, 1)
        resumed = (await open_job(second, JOB, num_choices=16)).resumed
        assert {choice.token_ids for choice in resumed} == {tuple(range(80))}


async def test_nothing_stands_when_the_log_was_trimmed(redis_server: RedisServer) -> None:
    config = replace(FAST, max_log_entries=64)
    async with running_publisher(redis_server.url, config) as first:
        await open_job(first, JOB)
        first.start(JOB, 1)
        for token in range(400):
            first.delta(JOB, 1, 0, "x", (token,))
            await first.flushed(JOB, 1)
        async with Redis.from_url(redis_server.url) as redis:
            assert await redis.xlen(JobKeys.of(JOB).log) < 200, "the log is bounded"
    async with running_publisher(redis_server.url) as second:
        assert (await open_job(second, JOB)).resumed[0].token_ids == ()


async def test_abandoning_writes_nothing_more_and_leaves_the_log_to_the_next_attempt(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        await begin(publisher)
        publisher.delta(JOB, 1, 0, "b", (2,))
        publisher.abandon(JOB, 1)
        assert not await publisher.flushed(JOB, 1)
        assert (await open_job(publisher, JOB)).resumed[0].token_ids == (1,)


async def test_only_attempts_without_a_token_and_without_a_goodbye_count_as_fruitless(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        counts = []
        for ending in ("crash", "crash", "token", "hand back", "hand back", "crash", "crash"):
            opened = await open_job(publisher, JOB)
            counts.append(opened.fruitless)
            publisher.start(JOB, opened.epoch)
            if ending == "token":
                publisher.delta(JOB, opened.epoch, 0, "x", (1,))
                assert await publisher.flushed(JOB, opened.epoch)
            elif ending == "hand back":
                publisher.abandon(JOB, opened.epoch)
    assert counts == [1, 2, 3, 1, 1, 1, 2]


async def test_an_ended_job_is_suppressed_and_another_record_with_its_id_is_a_duplicate(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        await open_job(publisher, JOB)
        other = await open_job(publisher, JOB, origin="jobs/0/8")
        assert (other.outcome, other.ended_status, other.same_digest) == (Outcome.DUPLICATE, None, True)
        changed = await open_job(publisher, JOB, digest="cd" * 32)
        assert (changed.outcome, changed.same_digest) == (Outcome.DUPLICATE, False)
        assert await publisher.end(JOB, 1, COMPLETED), "the duplicates changed nothing"
        again = await open_job(publisher, JOB)
        assert (again.outcome, again.epoch, again.ended_status) == (Outcome.ENDED, 1, "completed")
