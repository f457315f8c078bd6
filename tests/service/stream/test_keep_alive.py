"""Keys of a job that a worker has do not expire, and are restored after Redis forgot them."""

from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from service.stream.publisher import Outcome
from tests.service.stream.one_job import JOB
from tests.support.redis import RedisServer
from tests.support.streams import (
    COMPLETED,
    FAST,
    eventually,
    keys_of,
    open_job,
    open_stream,
    running_publisher,
    stream_of,
)

pytestmark = pytest.mark.redis

SHORT_LIVED = replace(FAST, stream_ttl_s=1)
WAITING = "waiting-job"
"""Opened, and without a place in the engine so far."""


class Renewals:
    """Counts how often the time to live of a key went up."""

    def __init__(self, server: RedisServer, key: str) -> None:
        self._client = server.client()
        self._key = key
        self.count = 0
        self._ttl_ms = self._read()

    def _read(self) -> int:
        ttl_ms: int = self._client.pttl(self._key)
        assert ttl_ms >= 0, f"{self._key} is gone after {self.count} renewals"
        return ttl_ms

    def look(self) -> int:
        before_ms, self._ttl_ms = self._ttl_ms, self._read()
        self.count += self._ttl_ms > before_ms
        return self.count

    def close(self) -> None:
        self._client.close()


async def test_a_job_that_waits_longer_than_the_time_to_live_keeps_its_keys(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url, SHORT_LIVED) as publisher:
        started = await open_stream(publisher, JOB)
        started.start()
        assert await started.flushed()
        await open_stream(publisher, WAITING)
        keys = (keys_of(JOB).log, keys_of(JOB).meta, keys_of(WAITING).meta)
        with ExitStack() as stack:
            renewals = [stack.enter_context(closing(Renewals(redis_server, key))) for key in keys]
            # A third of a second apart each: five of them outlast the second that the keys were given.
            await eventually(lambda: min(one.look() for one in renewals) >= 5, "all of them live on", 15)


async def test_a_job_that_has_ended_or_was_handed_back_is_not_kept(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url, SHORT_LIVED) as publisher:
        ended, handed_back = [await open_stream(publisher, job_id) for job_id in (JOB, WAITING)]
        assert await ended.end(COMPLETED)
        handed_back.abandon()
        with closing(redis_server.client()) as client:
            await eventually(lambda: client.dbsize() == 0, "their keys expire")


async def test_a_forgotten_job_without_new_events_is_written_to_redis_again(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url, SHORT_LIVED) as publisher:
        publisher.deployment = "here"
        await open_job(publisher, WAITING)
        opened = await open_job(publisher, WAITING)
        stream = stream_of(opened)
        redis_server.flush()
        with closing(redis_server.client()) as client:
            meta = keys_of(WAITING).meta
            await eventually(lambda: bool(client.exists(meta)), "it is written again")
            kept = client.hgetall(meta)
        assert kept == {
            b"epoch": b"%d" % stream.epoch,
            b"writer": stream.attempt.writer.encode(),
            b"origin": stream.attempt.origin.encode(),
            b"digest": stream.attempt.fingerprint.encode(),
            b"deployment": b"here",
            b"attempts": b"2",
            b"next_seq": b"0",
        }
        other = await open_job(publisher, WAITING, origin="jobs/0/8")
        assert other.outcome is Outcome.DUPLICATE, "its id is protected"
        assert (await open_job(publisher, WAITING)).attempts == 3
