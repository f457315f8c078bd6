"""Reading a stream: joined at any time, through lost connections, a slow reader and a Redis that forgets."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from service.stream.keys import JobKeys
from service.stream.publisher import StreamPublisher
from service.stream.reader import Gap, Verdict, read_stream
from service.wire.event import Delta, Event, Start, encode_event
from tests.support.proxy import running_proxy
from tests.support.redis import RedisServer
from tests.support.streams import COMPLETED, FAST, Followed, eventually, open_job, running_publisher

pytestmark = pytest.mark.redis
JOB = "job-1"


async def write(
    publisher: StreamPublisher, tokens: range, *, epoch: int = 1, text: str | None = None
) -> None:
    """One flush, and so one event, per token."""
    for token in tokens:
        publisher.delta(JOB, epoch, 0, f"{token} " if text is None else text, (token,))
        assert await publisher.flushed(JOB, epoch)


def words(stop: int) -> str:
    return "".join(f"{token} " for token in range(stop))


def seen(count: int) -> Callable[[Followed], bool]:
    return lambda followed: len(followed.events) >= count


async def test_subscribing_after_dispatch_loses_the_first_events_unless_the_log_is_read(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        await open_job(publisher, JOB)
        early = Followed(redis, JOB)
        publisher.start(JOB, 1)
        await write(publisher, range(10))
        async with redis.pubsub() as naive:
            await naive.subscribe(JobKeys.of(JOB).live)
            assert (await naive.get_message(timeout=5))["type"] == "subscribe"
            late = Followed(redis, JOB)
            await late.until(seen(11))
            await write(publisher, range(10, 20))
            assert await publisher.end(JOB, 1, COMPLETED)
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
        await open_job(old, JOB)
        live = Followed(redis, JOB)
        old.start(JOB, 1)
        await write(old, range(5))
        await live.until(seen(6))
        await open_job(new, JOB)
        new.start(JOB, 2)
        await write(new, range(5, 9), epoch=2)
        assert await new.end(JOB, 2, COMPLETED)
        for followed in (live, Followed(redis, JOB)):
            assert (await followed.verdict()).complete
            assert followed.assembler.texts() == [words(9)]
            assert followed.gaps == []


@pytest.mark.parametrize("retries", [0, 5])
async def test_a_silent_resubscription_after_a_reconnect_replays_the_log(
    redis_server: RedisServer, retries: int
) -> None:
    """With retries redis-py reconnects inside get_message, also inside its own resubscription (#3640)."""
    retry = Retry(ExponentialBackoff(base=0.01, cap=0.05), retries)
    async with (
        running_publisher(redis_server.url) as publisher,
        Redis.from_url(redis_server.url, retry=retry) as redis,
        Redis.from_url(redis_server.url) as admin,
    ):
        await open_job(publisher, JOB)
        followed = Followed(redis, JOB)
        publisher.start(JOB, 1)
        for token in range(0, 30, 3):
            await write(publisher, range(token, token + 2))
            await followed.until(seen(token + 3))
            await admin.client_kill_filter(_type="pubsub")
            await write(publisher, range(token + 2, token + 3))
        await publisher.end(JOB, 1, COMPLETED)
        assert (await followed.verdict()).complete
        assert followed.gaps == []
        assert [event.seq for event in followed.events] == list(range(32))


async def test_a_slow_subscriber_is_cut_by_redis_and_resumes_from_the_log(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as publisher,
        running_proxy(redis_server.port) as proxy,
        Redis.from_url(proxy.url) as redis,
        Redis.from_url(redis_server.url) as admin,
    ):
        await admin.config_set("client-output-buffer-limit", "pubsub 262144 262144 60")
        await open_job(publisher, JOB)
        followed = Followed(redis, JOB)
        publisher.start(JOB, 1)
        await followed.until(seen(1))
        followed.may_go_on.clear()
        connections = proxy.num_connections
        await write(publisher, range(150), text="x" * 100_000)
        await publisher.end(JOB, 1, COMPLETED)
        assert not await admin.client_list(_type="pubsub"), "Redis has cut the reader off"
        followed.may_go_on.set()
        assert (await followed.verdict()).complete
        assert followed.gaps == []
        assert proxy.num_connections > connections
        assert [event.seq for event in followed.events] == list(range(152))


async def test_a_half_open_connection_is_noticed_by_an_unanswered_ping(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as publisher,
        running_proxy(redis_server.port) as proxy,
        Redis.from_url(proxy.url) as redis,
    ):
        await open_job(publisher, JOB)
        followed = Followed(redis, JOB)
        publisher.start(JOB, 1)
        await followed.until(seen(1))
        connections = proxy.num_connections
        proxy.stall("to_client")
        await write(publisher, range(3))
        await publisher.end(JOB, 1, COMPLETED)
        await eventually(lambda: proxy.num_connections > connections, "the reader connects anew")
        proxy.cut()
        proxy.resume()
        assert (await followed.verdict()).complete


async def test_waiting_longer_than_the_clients_socket_timeout_breaks_nothing(
    redis_server: RedisServer,
) -> None:
    async with (
        running_publisher(redis_server.url) as publisher,
        running_proxy(redis_server.port) as proxy,
        Redis.from_url(proxy.url, socket_timeout=0.05) as redis,
    ):
        followed = Followed(redis, JOB, replace(FAST, heartbeat_s=0.15))
        await eventually(lambda: proxy.chunks["to_server"] > 8, "several heartbeats have passed")
        assert proxy.num_connections == 2, "one for the channel, one for the log"
        await open_job(publisher, JOB)
        await publisher.end(JOB, 1, COMPLETED)
        assert (await followed.verdict()).complete


async def test_closing_with_a_waiting_reader_does_not_hang(redis_server: RedisServer) -> None:
    async with running_proxy(redis_server.port) as proxy:
        for stalled in (False, True):
            async with Redis.from_url(proxy.url) as redis:
                followed = Followed(redis, JOB)
                await proxy.passed("to_client", 5)
                if stalled:
                    proxy.stall("to_client")
                await followed.leave()
                assert followed.task.cancelled()
        proxy.resume()


async def test_a_redis_that_lost_its_memory_is_a_gap_for_the_late_and_none_for_those_who_had_read(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        await open_job(publisher, JOB)
        early = Followed(redis, JOB)
        publisher.start(JOB, 1)
        await write(publisher, range(5))
        await early.until(seen(6))
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
        await open_job(old, JOB)
        followed = Followed(redis, JOB)
        old.start(JOB, 1)
        await write(old, range(9))
        await followed.until(seen(10))
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


@pytest.mark.parametrize("decode", [False, True])
async def test_a_job_without_a_stream_ends_with_a_verdict_that_says_so(
    redis_server: RedisServer, decode: bool
) -> None:
    async with (
        running_publisher(redis_server.url) as publisher,
        Redis.from_url(redis_server.url, decode_responses=decode) as redis,
    ):
        waiting = Followed(redis, JOB)
        await open_job(publisher, JOB, stream=False)
        await publisher.end(JOB, 1, COMPLETED)
        for followed in (waiting, Followed(redis, JOB)):
            verdict = await followed.verdict()
            assert verdict.status == "completed"
            assert not verdict.complete


async def test_a_client_that_decodes_responses_can_read_too(redis_server: RedisServer) -> None:
    async with (
        running_publisher(redis_server.url) as publisher,
        Redis.from_url(redis_server.url, decode_responses=True) as redis,
    ):
        await open_job(publisher, JOB)
        followed = Followed(redis, JOB, replace(FAST, heartbeat_s=0.02))
        publisher.start(JOB, 1)
        await write(publisher, range(3), text="é")
        await followed.until(seen(4))
        await publisher.end(JOB, 1, COMPLETED)
        assert (await followed.verdict()).complete


async def test_an_unknown_job_is_waited_for_and_the_wait_can_be_limited(redis_server: RedisServer) -> None:
    async with (
        Redis.from_url(redis_server.url) as redis,
        aclosing(read_stream(redis, "nobody", idle_timeout_s=0.05, config=FAST)) as stream,
    ):
        with pytest.raises(TimeoutError, match=r"'nobody': no event within 0\.05 s"):
            await anext(stream)


async def test_a_redis_that_is_away_is_waited_for_within_the_limit(redis_server: RedisServer) -> None:
    redis_server.stop()
    async with Redis.from_url(redis_server.url) as redis:
        async with aclosing(read_stream(redis, JOB, idle_timeout_s=0.1, config=FAST)) as stream:
            with pytest.raises(TimeoutError, match="no event within"):
                await anext(stream)
        followed = Followed(redis, JOB)
        redis_server.start()
        async with running_publisher(redis_server.url) as publisher:
            await open_job(publisher, JOB)
            await publisher.end(JOB, 1, COMPLETED)
            assert isinstance(await followed.verdict(), Verdict)
