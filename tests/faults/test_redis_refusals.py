"""A Redis that answers but refuses, in every version that is served: jobs wait, and none is blamed.

Before version 7 an error inside a script comes wrapped in a sentence about the script.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from service.stream.control import request_cancel
from service.worker.worker import Worker
from tests.support.kafka import KafkaBroker
from tests.support.members import eventually
from tests.support.redis import RedisServer
from tests.support.service import ServiceUnderTest, new_service, running_worker
from tests.support.streams import NAMESPACE

README = Path(__file__).resolve().parents[2] / "README.md"

pytestmark = [pytest.mark.kafka, pytest.mark.redis]


@contextmanager
def out_of_memory(server: RedisServer) -> Iterator[str]:
    with contextlib.closing(server.client()) as client:
        client.config_set("maxmemory", "1")
        try:
            yield "maxmemory"
        finally:
            client.config_set("maxmemory", "0")


@contextmanager
def read_only(server: RedisServer) -> Iterator[str]:
    """A replica whose master does not answer keeps what it has and takes nothing."""
    with contextlib.closing(server.client()) as client:
        client.replicaof("127.0.0.1", "1")
        try:
            yield "read only replica"
        finally:
            client.replicaof("NO", "ONE")


@contextmanager
def cannot_save(server: RedisServer) -> Iterator[str]:
    """A folder stands where the snapshot belongs, and the server is told to stop writes then."""
    obstacle = server.folder / "dump.rdb"
    with contextlib.closing(server.client()) as client:
        obstacle.mkdir()
        client.config_set("save", "3600 1")
        _save(client)
        try:
            yield "snapshot"
        finally:
            obstacle.rmdir()
            client.config_set("save", "")
            _save(client)


def _save(client: redis.Redis) -> None:
    """Returns when the server knows how a snapshot went."""
    with contextlib.suppress(redis.ResponseError):
        client.save()  # sets the status by itself, before it answers
    client.bgsave()
    while client.info("persistence")["rdb_bgsave_in_progress"]:  # type: ignore[index]
        pass


REFUSALS = {"out-of-memory": out_of_memory, "read-only": read_only, "cannot-save": cannot_save}


async def test_refusals_of_the_server_make_jobs_wait_and_blame_none(
    kafka: KafkaBroker, any_redis_server: RedisServer
) -> None:
    """One worker meets one refusal after another."""
    any_redis_server.flush()
    service = await new_service(kafka, any_redis_server)
    async with running_worker(service.settings(deterministic_step_ms="5", max_num_seqs="8")) as worker:
        for refusal in REFUSALS:
            await _refuse(service, any_redis_server, worker, refusal)
            await eventually(lambda: not worker.readiness.reasons(), f"ready again after {refusal}")
    assert all(len(records) == 1 for records in (await service.read_results()).values())


async def _refuse(service: ServiceUnderTest, server: RedisServer, worker: Worker, refusal: str) -> None:
    """Jobs run and others arrive while the server refuses; all complete after it."""
    running = [{"id": f"{refusal}-running-{i}", "prompt": f"q {i}", "max_tokens": 120} for i in range(4)]
    waiting = [{"id": f"{refusal}-waiting-{i}", "prompt": f"q {i}", "max_tokens": 10} for i in range(20)]
    await service.publish(running)
    await service.wait_for_tokens(str(running[0]["id"]), 10)
    with REFUSALS[refusal](server) as word:
        await service.publish(waiting)
        await eventually(lambda: "redis" in worker.readiness.reasons(), f"the worker says so: {refusal}")
        assert worker.parts is not None
        publisher = worker.parts.publisher
        failures = publisher.stats().failures
        await eventually(lambda: publisher.stats().failures > failures + 3, f"it goes on trying: {refusal}")
        assert word in worker.readiness.reasons()["redis"]
    results = await service.wait_for_results([str(job["id"]) for job in [*running, *waiting]])
    streams = [await service.read(job_id) for job_id in results]
    assert {result.status for result in results.values()} == {"completed"}, refusal
    assert [stream.verdict.problems for stream in streams if not stream.verdict.complete] == [], refusal


async def test_a_user_without_a_right_consumes_nothing_until_it_has_it(
    kafka: KafkaBroker, any_redis_server: RedisServer
) -> None:
    """One deployment and one user for each missing right, side by side."""
    any_redis_server.flush()
    async with asyncio.TaskGroup() as tasks:
        for missing in ("hincrby", "xadd", "publish", "subscribe"):
            tasks.create_task(_lack(kafka, any_redis_server, missing), name=missing)


async def _lack(kafka: KafkaBroker, server: RedisServer, missing: str) -> None:
    name = f"without-{missing}"
    service = await new_service(kafka, server)
    service.environ["TAILRACE_NAMESPACE"] = name
    user = ["ACL", "SETUSER", name, "on", ">secret", "allkeys", "allchannels", "+@all"]
    url = server.url.replace("://", f"://{name}:secret@")
    job_ids = [f"{missing}-{i}" for i in range(20)]
    async with Redis.from_url(server.url) as admin:
        await admin.execute_command(*user, f"-{missing}")
        try:
            async with running_worker(service.settings(redis_url=url)) as worker:
                await service.publish([{"id": job_id, "prompt": "x", "max_tokens": 4} for job_id in job_ids])
                await eventually(
                    lambda: (
                        "a worker needs" in worker.readiness.reasons().get("redis", "")
                        or "permissions" in worker.readiness.reasons().get("redis", "")
                    ),
                    f"the worker says what is wrong: {missing}",
                )
                assert worker.parts is not None
                await eventually(
                    lambda: worker.parts.consumer.ready,  # type: ignore[union-attr]
                    f"the consumer could fetch: {missing}",
                )
                assert worker.parts.consumer.stats().deliveries == 0, missing
                await admin.execute_command(*user)
                results = await service.wait_for_results(job_ids)
                await eventually(lambda: not worker.readiness.reasons(), f"ready again: {missing}")
        finally:
            await admin.execute_command("ACL", "DELUSER", name)
    assert {result.status for result in results.values()} == {"completed"}, missing


async def test_a_job_waits_longer_than_its_stream_may_live(
    kafka: KafkaBroker, any_redis_server: RedisServer
) -> None:
    """One slot, a time to live of a second, and a job that waits for more than two."""
    any_redis_server.flush()
    service = await new_service(kafka, any_redis_server, partitions=1)
    settings = service.settings(stream_ttl_s="1", max_num_seqs="1", deterministic_step_ms="10")
    async with running_worker(settings):
        await service.publish(
            [
                {"id": "long", "prompt": "x", "max_tokens": 230},
                {"id": "queued", "prompt": "y", "max_tokens": 5},
            ]
        )
        reading = asyncio.create_task(service.read("queued"))
        results = await service.wait_for_results(["long", "queued"])
        stream = await reading
    assert results["queued"].timings.queued_s is not None
    assert results["queued"].timings.queued_s > 2
    assert stream.verdict.complete
    assert not stream.gaps
    assert [start.resumed_tokens for start in stream.starts] == [(0,)]


async def test_the_rights_that_the_readme_lists_are_enough(
    kafka: KafkaBroker, any_redis_server: RedisServer
) -> None:
    any_redis_server.flush()
    service = await new_service(kafka, any_redis_server)
    rights = README.read_text().split("a Redis user with\n`")[1].split("`")[0].split()
    url = any_redis_server.url.replace("://", "://minimal:secret@")
    async with Redis.from_url(any_redis_server.url) as admin:
        await admin.execute_command(
            "ACL",
            "SETUSER",
            "minimal",
            "reset",
            "resetchannels",
            "on",
            ">secret",
            "~tailrace:*",
            "&tailrace:*",
            *rights,
        )
        try:
            async with running_worker(service.settings(redis_url=url, deterministic_step_ms="5")) as worker:
                await service.publish(
                    [{"id": f"job-{i}", "prompt": "x", "max_tokens": 100} for i in range(4)]
                )
                await service.wait_for_tokens("job-0", 3)
                await request_cancel(admin, "job-1", namespace=NAMESPACE)
                results = await service.wait_for_results([f"job-{i}" for i in range(4)])
                await eventually(lambda: not worker.readiness.reasons(), "ready")
        finally:
            await admin.execute_command("ACL", "DELUSER", "minimal")
    assert {result.status for result in results.values()} <= {"completed", "cancelled"}
