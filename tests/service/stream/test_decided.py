"""A decision is final: the next attempt sends the bytes that an earlier one may have sent already."""

import asyncio
from contextlib import closing

import pytest
from redis.asyncio import Redis

from service.stream.publisher import Outcome
from tests.service.stream.one_job import JOB, assembled, begin
from tests.support.proxy import Direction, running_proxy
from tests.support.redis import RedisServer
from tests.support.streams import (
    COMPLETED,
    eventually,
    keys_of,
    log_events,
    open_job,
    open_stream,
    running_publisher,
    stream_of,
)

pytestmark = pytest.mark.redis

RECORD = b'{"text":"\r\n$5\r\n"}' + bytes(range(256))


async def decided_in_redis(redis: Redis) -> bytes | None:
    kept = await redis.hget(keys_of(JOB).meta, "decided")
    assert not isinstance(kept, str)
    return kept


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_worker_that_dies_after_deciding_leaves_its_bytes_until_the_end(
    redis_server: RedisServer, streamed: bool
) -> None:
    async with Redis.from_url(redis_server.url) as redis:
        async with running_publisher(redis_server.url) as dying:
            opened = await open_job(dying, JOB, stream=streamed)
            assert opened.decided is None
            stream = stream_of(opened)
            stream.delta(0, "a", (1,))
            assert await stream.decide(RECORD)
            assert len(await log_events(redis, JOB)) == 2 * streamed, "the deltas are in the log before"
        async with running_publisher(redis_server.url) as publisher:
            for _ in range(2):
                opened = await open_job(publisher, JOB, stream=streamed)
                assert opened.decided == RECORD
                assert stream_of(opened).start()
                assert await stream_of(opened).flushed()
            assert await stream_of(opened).end(COMPLETED)
            assert await decided_in_redis(redis) is None
            again = await open_job(publisher, JOB, stream=streamed)
            assert (again.outcome, again.decided) == (Outcome.ENDED, None)


async def test_a_decision_whose_acknowledgement_was_lost_is_sent_again_and_kept_once(
    redis_server: RedisServer,
) -> None:
    async with (
        running_proxy(redis_server.port) as proxy,
        running_publisher(proxy.url) as publisher,
        Redis.from_url(redis_server.url) as redis,
    ):
        stream = await open_stream(publisher, JOB)

        def lose_the_answer(direction: Direction, chunk: bytes) -> None:
            if direction == "to_server" and RECORD in chunk:
                carried.append(chunk)
                if len(carried) == 1:
                    proxy.stall("to_client")

        carried: list[bytes] = []
        proxy.on_chunk = lose_the_answer
        stream.delta(0, "a", (1,))
        deciding = asyncio.create_task(stream.decide(RECORD))
        with closing(redis_server.client()) as client:
            await eventually(lambda: bool(client.hexists(keys_of(JOB).meta, "decided")), "it is written")
        assert not deciding.done()
        proxy.cut()
        proxy.resume()
        assert await deciding
        assert len(carried) == 2, "control: it was sent again"
        events = await log_events(redis, JOB)
        assert [event.kind for event in events] == ["start", "delta"]
        assembled(events)
        assert (await open_job(publisher, JOB)).decided == RECORD


async def test_a_decision_may_be_replaced_by_the_same_attempt_only(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as old_worker,
        running_publisher(redis_server.url) as new_worker,
    ):
        old = await begin(old_worker)
        assert await old.decide(b"too large for Kafka")
        assert await old.decide(RECORD)
        opened = await open_job(new_worker, JOB)
        assert opened.decided == RECORD
        assert not await old.decide(b"zombie's")
        assert (await open_job(new_worker, JOB)).decided == RECORD


async def test_a_decision_for_one_record_is_not_given_to_another(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as publisher:
        stream = await begin(publisher)
        assert await stream.decide(RECORD)
        other = await open_job(publisher, JOB, origin="jobs/0/8")
        assert (other.outcome, other.decided) == (Outcome.DUPLICATE, None)


async def test_the_next_write_restores_a_decision_that_the_server_forgot(
    redis_server: RedisServer,
) -> None:
    async with Redis.from_url(redis_server.url) as redis, running_publisher(redis_server.url) as publisher:
        stream = await begin(publisher)
        assert await stream.decide(RECORD)
        redis_server.flush()
        stream.keep_alive()
        assert await stream.flushed()
        assert await decided_in_redis(redis) == RECORD
