"""Many streams at once, joined at every stage, with a worker that dies and connections that break."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from service.stream.publisher import StreamPublisher
from service.wire.common import Usage
from service.wire.event import Ending
from tests.support.redis import RedisServer
from tests.support.streams import FAST, Followed, open_job, running_publisher, stream_of

pytestmark = pytest.mark.redis
NUM_JOBS = 24
NUM_TOKENS = 30


def token_text(job_id: str, token: int) -> str:
    """What the "model" says; a pure function, so that every attempt continues the same text."""
    return f"{job_id}/{token} "


def whole_text(job_id: str) -> str:
    return "".join(token_text(job_id, token) for token in range(NUM_TOKENS))


async def generate(publisher: StreamPublisher, job_id: str, gate: asyncio.Semaphore, stop_at: int) -> bool:
    """One attempt: continues the stream, writes up to `stop_at` tokens; True when it has ended the job."""
    opened = await open_job(publisher, job_id)
    stream = stream_of(opened)
    (resumed,) = opened.resumed
    assert resumed.text == "".join(token_text(job_id, token) for token in resumed.token_ids)
    stream.start()
    for token in range(len(resumed.token_ids), stop_at):
        async with gate:
            stream.delta(0, token_text(job_id, token), (token,))
            assert await stream.flushed()
    if stop_at < NUM_TOKENS:
        return False
    return await stream.end(Ending("completed", "length", Usage(1, NUM_TOKENS, 0)))


async def test_late_joins_under_concurrent_streams_and_a_dead_worker_lose_nothing(
    redis_server: RedisServer,
) -> None:
    rng = random.Random(7)
    ids = [f"job-{i}" for i in range(NUM_JOBS)]
    gate = asyncio.Semaphore(8)
    readers: list[Followed] = []
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(Redis.from_url(redis_server.url, max_connections=200))
        readers += [Followed(redis, job_id, FAST) for job_id in ids]
        async with running_publisher(redis_server.url) as dying:
            attempts = (generate(dying, job_id, gate, rng.randrange(NUM_TOKENS)) for job_id in ids)
            await asyncio.gather(*attempts)
            readers += [Followed(redis, job_id, FAST) for job_id in ids]
        await redis.client_kill_filter(_type="pubsub")
        living = await stack.enter_async_context(running_publisher(redis_server.url))
        attempts = (generate(living, job_id, gate, NUM_TOKENS) for job_id in ids)
        running = asyncio.gather(*attempts)
        await readers[-1].until(lambda followed: len(followed.events) > 3)
        readers += [Followed(redis, job_id, FAST) for job_id in ids]
        await redis.client_kill_filter(_type="pubsub")
        assert all(await running)
        readers += [Followed(redis, job_id, FAST) for job_id in ids]
        for reader in readers:
            verdict = await reader.verdict()
            assert verdict.complete, verdict.problems
            assert reader.gaps == []
            assert reader.assembler.texts() == [whole_text(reader.assembler.job_id)]
            assert reader.assembler.choice(0).token_ids == list(range(NUM_TOKENS))
            assert len({(event.epoch, event.seq) for event in reader.events}) == len(reader.events)
