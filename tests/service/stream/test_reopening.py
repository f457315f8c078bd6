"""Which record owns an id that several records, deployments or repeated calls have opened."""

import asyncio
from contextlib import closing
from typing import Any

import pytest
from redis.asyncio import Redis

from service.stream.publisher import Opened, Outcome, StreamPublisher
from service.wire.common import Usage
from service.wire.event import Ending
from tests.service.stream.one_job import JOB, begin
from tests.support.proxy import Direction, running_proxy
from tests.support.redis import RedisServer
from tests.support.streams import (
    COMPLETED,
    REFUSED,
    eventually,
    keys_of,
    log_events,
    open_job,
    open_stream,
    running_publisher,
    stream_of,
)

pytestmark = pytest.mark.redis

OTHER: dict[str, Any] = {"origin": "jobs/0/8", "digest": "cd" * 32}


def opened_anew(opened: Opened, above: int) -> bool:
    """Nothing of the earlier state is left."""
    return (
        opened.outcome is Outcome.OPENED
        and opened.epoch > above
        and (opened.attempts, opened.attempts_without_progress) == (1, 1)
        and opened.decided is None
        and all(choice.token_ids == () and choice.text == "" for choice in opened.resumed)
    )


async def test_a_refused_id_is_free_for_another_record_and_the_refusal_leaves_nothing(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        refused = await begin(publisher)
        assert await refused.decide(b"rejected")
        assert await refused.end(REFUSED)
        again = await open_job(publisher, JOB)
        assert (again.outcome, again.epoch, again.fate) == (Outcome.ENDED, refused.epoch, "rejected")
        opened = await open_job(publisher, JOB, **OTHER)
        assert opened_anew(opened, refused.epoch)
        assert await log_events(redis, JOB) == []
        assert (await open_job(publisher, JOB)).outcome is Outcome.DUPLICATE, "the id has gone to the other"
        assert await stream_of(opened).end(COMPLETED)
        assert {event.epoch for event in await log_events(redis, JOB)} == {opened.epoch}
        assert (await open_job(publisher, JOB, origin="jobs/0/9")).outcome is Outcome.DUPLICATE


async def test_an_id_whose_job_was_run_and_rejected_is_not_free(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as publisher:
        stream = await open_stream(publisher, JOB)
        assert await stream.end(Ending("rejected", None, Usage()))
        assert (await open_job(publisher, JOB, **OTHER)).outcome is Outcome.DUPLICATE


async def left_by(publisher: StreamPublisher, *, ended: bool) -> int:
    """The epoch of an attempt that has written something."""
    stream = await begin(publisher)
    if ended:
        assert await stream.decide(b"record")
        assert await stream.end(COMPLETED)
    return stream.epoch


@pytest.mark.parametrize(
    ("ended", "record", "own"),
    [(True, {}, Outcome.ENDED), (True, OTHER, Outcome.DUPLICATE), (False, OTHER, Outcome.DUPLICATE)],
)
async def test_ids_of_a_deployment_that_is_gone_do_not_suppress_the_jobs_of_this_one(
    redis_server: RedisServer, ended: bool, record: dict[str, Any], own: Outcome
) -> None:
    async with (
        running_publisher(redis_server.url) as gone,
        running_publisher(redis_server.url) as here,
        Redis.from_url(redis_server.url) as redis,
    ):
        gone.deployment, here.deployment = "gone", "here"
        epoch = await left_by(gone, ended=ended)
        control = await open_job(gone, JOB, **record)
        assert (control.outcome, control.epoch) == (own, epoch), "its own it does not open anew"
        assert opened_anew(await open_job(here, JOB, **record), epoch)
        assert await log_events(redis, JOB) == []
        assert await redis.hget(keys_of(JOB).meta, "deployment") == b"here"


async def test_a_record_left_unfinished_by_another_deployment_is_continued(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as gone, running_publisher(redis_server.url) as here:
        gone.deployment, here.deployment = "gone", "here"
        await left_by(gone, ended=False)
        opened = await open_job(here, JOB)
        assert (opened.attempts, opened.resumed[0].token_ids) == (2, (1,))


async def test_an_opening_whose_reply_was_lost_counts_once_and_keeps_its_epoch(
    redis_server: RedisServer,
) -> None:
    async with running_proxy(redis_server.port) as proxy, running_publisher(proxy.url) as publisher:
        await open_job(publisher, "warm")
        num_sent = 0

        def lose_the_reply(direction: Direction, chunk: bytes) -> None:
            nonlocal num_sent
            if direction == "to_server" and keys_of(JOB).meta.encode() in chunk:
                num_sent += 1
                if num_sent == 1:
                    proxy.stall("to_client")

        proxy.on_chunk = lose_the_reply
        opening = asyncio.create_task(open_job(publisher, JOB))
        with closing(redis_server.client()) as client:

            def epoch() -> bytes | None:
                held: bytes | None = client.hget(keys_of(JOB).meta, "epoch")  # type: ignore[assignment]
                return held

            await eventually(lambda: epoch() is not None, "the server has opened it")
            first = int(epoch() or 0)
            proxy.cut()
            proxy.resume()
            opened = await opening
            assert num_sent == 2, "control: it was sent again"
            assert opened.epoch == first == int(epoch() or 0)
        assert (opened.attempts, opened.attempts_without_progress) == (1, 1)
        assert await stream_of(opened).end(COMPLETED)


async def test_hazard_the_first_sending_of_a_repeated_opening_arrives_after_the_first_events(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the events counted from 0 again, those that are sent again after a lost reply would be in the log twice."""
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        commands = []
        request = publisher._loop.request

        async def recorded(command: bytes) -> Any:
            commands.append(command)
            return await request(command)

        monkeypatch.setattr(publisher._loop, "request", recorded)
        stream = await begin(publisher)
        counted = await redis.hget(keys_of(JOB).meta, "next_seq")
        outcome, epoch, *_ = await request(commands[0])
        assert (outcome, epoch) == (b"opened", stream.epoch)
        assert await redis.hget(keys_of(JOB).meta, "next_seq") == counted == b"2"
