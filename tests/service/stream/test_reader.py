"""Reading a stream: joined at any time, over several attempts, or where there is none."""

from contextlib import aclosing
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from service.stream.reader import read_stream
from tests.service.stream.one_job import JOB, begin_and_follow, seen, words, write
from tests.support.redis import RedisServer
from tests.support.streams import COMPLETED, FAST, Followed, keys_of, open_stream, running_publisher

pytestmark = pytest.mark.redis


async def test_subscribing_after_dispatch_loses_the_first_events_unless_the_log_is_read(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        stream = await open_stream(publisher, JOB)
        early = Followed(redis, JOB)
        stream.start()
        await write(stream, range(10))
        async with redis.pubsub() as naive:
            await naive.subscribe(keys_of(JOB).live)
            assert (await naive.get_message(timeout=5))["type"] == "subscribe"
            late = Followed(redis, JOB)
            await late.until(seen(11))
            await write(stream, range(10, 20))
            assert await stream.end(COMPLETED)
            first = await naive.get_message(timeout=5)
            assert b'"seq":11' in first["data"], "control: pub/sub alone begins in the middle"
        after_the_end = Followed(redis, JOB)
        for followed in (early, late, after_the_end):
            assert (await followed.verdict()).complete
            assert followed.assembler.texts() == [words(20)]
            assert [event.seq for event in followed.events] == list(range(22))


async def test_a_new_attempt_with_reused_sequence_numbers_loses_no_token(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as old,
        running_publisher(redis_server.url) as new,
        Redis.from_url(redis_server.url) as redis,
    ):
        _, live = await begin_and_follow(old, redis, 5)
        stream = await open_stream(new, JOB)
        stream.start()
        await write(stream, range(5, 9))
        assert await stream.end(COMPLETED)
        for followed in (live, Followed(redis, JOB)):
            assert (await followed.verdict()).complete
            assert followed.assembler.texts() == [words(9)]
            assert followed.gaps == []


@pytest.mark.parametrize("decode", [False, True])
async def test_a_job_without_a_stream_ends_with_a_verdict_that_says_so(
    redis_server: RedisServer, decode: bool
) -> None:
    async with (
        running_publisher(redis_server.url) as publisher,
        Redis.from_url(redis_server.url, decode_responses=decode) as redis,
    ):
        waiting = Followed(redis, JOB)
        stream = await open_stream(publisher, JOB, stream=False)
        await stream.end(COMPLETED)
        for followed in (waiting, Followed(redis, JOB)):
            verdict = await followed.verdict()
            assert verdict.status == "completed"
            assert not verdict.complete


async def test_a_client_that_decodes_responses_can_read_too(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as publisher,
        Redis.from_url(redis_server.url, decode_responses=True) as redis,
    ):
        stream = await open_stream(publisher, JOB)
        followed = Followed(redis, JOB, replace(FAST, heartbeat_s=0.02))
        stream.start()
        await write(stream, range(3), text="é")
        await followed.until(seen(4))
        await stream.end(COMPLETED)
        assert (await followed.verdict()).complete


async def test_an_unknown_job_is_waited_for_and_the_wait_can_be_limited(redis_server: RedisServer) -> None:
    async with (
        Redis.from_url(redis_server.url) as redis,
        aclosing(read_stream(redis, "nobody", idle_timeout_s=0.05, config=FAST)) as stream,
    ):
        with pytest.raises(TimeoutError, match=r"'nobody': no event within 0\.05 s"):
            await anext(stream)
