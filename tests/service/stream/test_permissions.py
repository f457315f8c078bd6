"""A missing right of the Redis user is reported before a job is taken; granting it is enough to recover."""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import redis
from redis.asyncio import Redis

from service.stream.control import CancelListener, request_cancel
from service.stream.keys import APPEND, CLAIM, HAND_BACK, OPEN
from service.stream.publisher import Outcome
from tests.service.stream.one_job import JOB
from tests.support.redis import RedisServer
from tests.support.streams import (
    COMPLETED,
    FAST,
    NAMESPACE,
    eventually,
    log_events,
    open_job,
    open_stream,
    running_publisher,
)

pytestmark = pytest.mark.redis

USER, PASSWORD = "tailrace-test", "s3cret"
CALL = re.compile(rb"redis\.p?call\('([A-Z]+)'")
OF_SCRIPTS = sorted(
    {
        name.decode().lower()
        for script in (CLAIM, OPEN, APPEND, HAND_BACK)
        for name in CALL.findall(script.source)
    }
)
assert {"hincrby", "xadd", "publish", "pexpire", "time", "del", "set"} <= set(OF_SCRIPTS)
OF_THE_CONNECTION = ("evalsha", "script", "xrange")


@pytest.fixture
def admin(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with closing(redis_server.client()) as client:
        yield client
        redis_server.start()
        client.acl_deluser(USER)


def url_without(server: RedisServer, admin: redis.Redis, *missing: str) -> str:
    grant(admin, "reset", "on", f">{PASSWORD}", "~*", "&*", "+@all", *(f"-{name}" for name in missing))
    return f"redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}/0"


def grant(admin: redis.Redis, *rights: str) -> None:
    admin.execute_command("ACL", "SETUSER", USER, *rights)  # type: ignore[no-untyped-call]


def names(command: str, problem: str) -> bool:
    """Before 7.2 Redis does not say which of a script's commands it was."""
    in_script = command in OF_SCRIPTS
    return f"'{command}" in problem or (in_script and "script can't run this command" in problem)


@pytest.mark.parametrize("missing", [*OF_SCRIPTS, *OF_THE_CONNECTION])
async def test_a_missing_right_is_an_outage_with_a_name_and_no_job_is_opened(
    redis_server: RedisServer, admin: redis.Redis, missing: str
) -> None:
    async with running_publisher(url_without(redis_server, admin, missing)) as publisher:

        def refused_again() -> bool:
            assert not publisher.healthy
            return publisher.stats().failures >= 3

        await eventually(refused_again, "connections are refused")
        assert names(missing, publisher.stats().problem or "")
        opening = asyncio.create_task(open_job(publisher, JOB))
        before = publisher.stats().failures
        await eventually(
            lambda: publisher.stats().failures >= before + 3 and not publisher.healthy, "and again"
        )
        assert not opening.done()
        assert admin.keys(f"*{JOB}*") == []
        grant(admin, f"+{missing}")
        assert (await opening).outcome is Outcome.OPENED
        assert (publisher.healthy, publisher.stats().problem) == (True, None)


async def test_rights_to_the_namespaces_keys_and_channels_are_enough(
    redis_server: RedisServer, admin: redis.Redis
) -> None:
    url = url_without(redis_server, admin)
    grant(admin, "resetkeys", "resetchannels", "~tailrace:*", "&tailrace:*", "-info")
    async with running_publisher(url) as publisher:
        assert (await open_job(publisher, JOB)).outcome is Outcome.OPENED
        holder, server_s = await publisher.claim("somebody")
        assert holder is None
        assert server_s == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize("missing", ["~*", "&*"])
async def test_a_user_without_rights_to_the_namespace_opens_no_job(
    redis_server: RedisServer, admin: redis.Redis, missing: str
) -> None:
    url = url_without(redis_server, admin)
    grant(admin, "resetkeys" if missing == "~*" else "resetchannels")
    async with running_publisher(url) as publisher:
        await eventually(lambda: publisher.stats().failures >= 3, "connections are refused")
        assert not publisher.healthy
        assert re.search("ermissions to access|can't (access|publish)", publisher.stats().problem or "")
        grant(admin, missing)
        assert (await open_job(publisher, JOB)).outcome is Outcome.OPENED


async def test_a_listener_that_may_not_subscribe_reports_it_and_recovers(
    redis_server: RedisServer, admin: redis.Redis
) -> None:
    heard: list[str] = []
    config = replace(FAST, redis_url=url_without(redis_server, admin, "subscribe"))
    listener = CancelListener(config, heard.append, list)
    running = asyncio.create_task(listener.run())
    try:
        await eventually(lambda: listener.problem is not None, "it is refused")
        assert "'subscribe'" in (listener.problem or "")
        assert not listener.listening.is_set()
        grant(admin, "+subscribe")
        await asyncio.wait_for(listener.listening.wait(), 5)
        assert listener.problem is None
        async with redis.asyncio.Redis.from_url(redis_server.url) as client:
            await request_cancel(client, JOB, namespace=NAMESPACE)
        await eventually(lambda: heard == [JOB], "it hears")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_hazard_an_event_whose_publication_is_refused_is_in_the_log_once(
    redis_server: RedisServer,
) -> None:
    """A script that is refused half way keeps what it has done."""
    url = redis_server.url.replace("://", "://half:secret@")
    async with Redis.from_url(redis_server.url) as admin:
        await admin.execute_command("ACL", "SETUSER", "half", "reset", "on", ">secret", "~*", "&*", "+@all")
        try:
            async with running_publisher(url) as publisher:
                stream = await open_stream(publisher, JOB)
                stream.delta(0, "a", (1,))
                assert await stream.flushed()
                await admin.execute_command("ACL", "SETUSER", "half", "resetchannels")
                stream.delta(0, "b", (2,))
                await eventually(lambda: publisher.stats().problem is not None, "the refusal is seen")
                await admin.execute_command("ACL", "SETUSER", "half", "&*")
                assert await stream.flushed()
                assert await stream.end(COMPLETED)
            events = await log_events(admin, JOB)
        finally:
            await admin.execute_command("ACL", "DELUSER", "half")
    assert [event.seq for event in events] == [0, 1, 2, 3]
