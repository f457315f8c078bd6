"""Reading through connections that are lost, stalled, cut off or not there yet."""

from contextlib import aclosing
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from service.stream.reader import Verdict, read_stream
from tests.service.stream.one_job import JOB, begin_and_follow, seen, write
from tests.support.proxy import running_proxy
from tests.support.redis import RedisServer
from tests.support.streams import COMPLETED, FAST, Followed, eventually, open_stream, running_publisher

pytestmark = pytest.mark.redis


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
        stream = await open_stream(publisher, JOB)
        followed = Followed(redis, JOB)
        stream.start()
        for token in range(0, 30, 3):
            await write(stream, range(token, token + 2))
            await followed.until(seen(token + 3))
            await admin.client_kill_filter(_type="pubsub")
            await write(stream, range(token + 2, token + 3))
        await stream.end(COMPLETED)
        assert (await followed.verdict()).complete
        assert followed.gaps == []
        assert [event.seq for event in followed.events] == list(range(32))


async def test_a_slow_subscriber_is_disconnected_by_redis_and_resumes_from_the_log(
    redis_server: RedisServer,
) -> None:
    async with (
        running_publisher(redis_server.url) as publisher,
        running_proxy(redis_server.port) as proxy,
        Redis.from_url(proxy.url) as redis,
        Redis.from_url(redis_server.url) as admin,
    ):
        await admin.config_set("client-output-buffer-limit", "pubsub 262144 262144 60")
        stream, followed = await begin_and_follow(publisher, redis)
        followed.may_go_on.clear()
        connections = proxy.num_connections
        await write(stream, range(150), text="x" * 100_000)
        await stream.end(COMPLETED)
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
        stream, followed = await begin_and_follow(publisher, redis)
        connections = proxy.num_connections
        proxy.stall("to_client")
        await write(stream, range(3))
        await stream.end(COMPLETED)
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
        stream = await open_stream(publisher, JOB)
        await stream.end(COMPLETED)
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


async def test_a_redis_that_is_away_is_waited_for_within_the_limit(redis_server: RedisServer) -> None:
    redis_server.stop()
    async with Redis.from_url(redis_server.url) as redis:
        async with aclosing(read_stream(redis, JOB, idle_timeout_s=0.1, config=FAST)) as stream:
            with pytest.raises(TimeoutError, match="no event within"):
                await anext(stream)
        followed = Followed(redis, JOB)
        redis_server.start()
        async with running_publisher(redis_server.url) as publisher:
            await (await open_stream(publisher, JOB)).end(COMPLETED)
            assert isinstance(await followed.verdict(), Verdict)
