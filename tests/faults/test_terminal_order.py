"""A job has one terminal record, whatever happens between the moment it is decided and the moment its offset is
committed: a kill, a cancellation, a deadline, a send that arrives late."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from service.stream.control import request_cancel
from service.wire import Result
from tests.support.kafka import KafkaBroker
from tests.support.members import eventually
from tests.support.processes import reap
from tests.support.proxy import Direction, Proxy, running_proxy
from tests.support.redis import RedisServer
from tests.support.service import ServiceUnderTest, new_service, running_worker
from tests.support.streams import NAMESPACE

pytestmark = [pytest.mark.kafka, pytest.mark.redis]

END = b'"kind":"end"'


@asynccontextmanager
async def stopped_before(
    redis_server: RedisServer, marker: bytes
) -> AsyncIterator[tuple[Proxy, asyncio.Event]]:
    """A proxy to Redis that lets nothing more through from the first piece on that holds `marker`."""
    reached = asyncio.Event()

    def watch(direction: Direction, chunk: bytes) -> None:
        if direction == "to_server" and marker in chunk:
            proxy.stall("to_server")
            reached.set()

    async with running_proxy(redis_server.port) as proxy:
        proxy.on_chunk = watch
        yield proxy, reached


@asynccontextmanager
async def killed_at(service: ServiceUnderTest, marker: bytes, **overrides: str) -> AsyncIterator[None]:
    """A worker runs during the block; after it the worker is killed when it is about to write `marker` to Redis."""
    async with stopped_before(service.redis_server, marker) as (proxy, reached):
        first = service.spawn(worker_id="first", redis_url=proxy.url, **overrides)
        try:
            yield
            async with asyncio.timeout(30):
                await reached.wait()
        finally:
            first.kill()
            reap(first)
    await service.forget_members()


async def killed_before(service: ServiceUnderTest, marker: bytes, jobs: list[dict[str, object]]) -> None:
    """A worker of its own is killed when it is about to write `marker` to Redis."""
    async with killed_at(service, marker):
        await service.publish(jobs)


async def killed_while_cancelling(service: ServiceUnderTest, *, max_tokens: int) -> None:
    """A worker is killed between the result and the end of a job that was cancelled; the request is forgotten."""
    async with killed_at(service, END, deterministic_step_ms="5"):
        await service.publish([{"id": "stopped", "prompt": "x", "max_tokens": max_tokens}])
        await service.wait_for_tokens("stopped", 5)
        await ask_to_cancel(service, "stopped")
    with contextlib.closing(service.redis_server.client()) as client:
        client.delete("tailrace:{stopped}:cancel")


async def ask_to_cancel(service: ServiceUnderTest, job_id: str) -> None:
    from redis.asyncio import Redis

    async with Redis.from_url(service.redis_server.url) as redis:
        await request_cancel(redis, job_id, namespace=NAMESPACE)


async def taken_over(service: ServiceUnderTest, job_id: str) -> list[Result]:
    """All terminal records of the job after a second worker has settled it; the stream agrees with them."""
    async with running_worker(service.settings(worker_id="second")):
        stream = await service.read(job_id)
    results = (await service.read_results())[job_id]
    assert stream.verdict.complete
    assert stream.verdict.status == results[-1].status
    if results[-1].choices:
        assert stream.text == results[-1].choices[0].text
    return results


async def test_completed_stays_completed_when_a_cancellation_follows_a_crash_between_result_and_end(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    await killed_before(service, END, [{"id": "done", "prompt": "x", "max_tokens": 12}])
    await ask_to_cancel(service, "done")
    before, after = await taken_over(service, "done")
    assert before.status == "completed"
    assert after == before, "the second record is the first one, byte for byte"


async def test_cancelled_stays_cancelled_when_the_request_is_forgotten_after_a_crash_between_result_and_end(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    await killed_while_cancelling(service, max_tokens=2000)
    before, after = await taken_over(service, "stopped")
    assert before.status == "cancelled"
    assert after == before


@pytest.mark.parametrize("late", ["cancelled", "past its deadline"])
async def test_a_job_whose_tokens_are_complete_ends_completed_whatever_comes_later(
    kafka: KafkaBroker, redis_server: RedisServer, late: str
) -> None:
    """All tokens are in the log, and what was decided is not known."""
    service = await new_service(kafka, redis_server, partitions=1)
    job = {"id": "whole", "prompt": "x", "max_tokens": 12, "stop": ["\n"]}
    if late != "cancelled":
        job["deadline"] = 3.0
    await killed_before(service, END, [job])
    with contextlib.closing(redis_server.client()) as client:
        assert client.hdel("tailrace:{whole}:meta", "decided") == 1
    if late == "cancelled":
        await ask_to_cancel(service, "whole")
    else:
        await asyncio.sleep(3.0)  # the deadline itself is what has to pass
    for result in await taken_over(service, "whole"):
        assert (result.status, result.usage.completion_tokens) == ("completed", 12)


async def test_a_decided_result_outlives_an_evicted_log(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    await killed_before(service, END, [{"id": "evicted", "prompt": "x", "max_tokens": 12}])
    with contextlib.closing(redis_server.client()) as client:
        client.delete("tailrace:{evicted}:log")
    before, after = await taken_over(service, "evicted")
    assert after == before


async def test_control_without_the_decided_record_a_cancellation_changes_the_outcome(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    """The job is unfinished when it is cancelled, and its cancellation is forgotten: only the record tells."""
    service = await new_service(kafka, redis_server, partitions=1)
    await killed_while_cancelling(service, max_tokens=400)
    with contextlib.closing(redis_server.client()) as client:
        client.hdel("tailrace:{stopped}:meta", "decided")
    before, after = await taken_over(service, "stopped")
    assert (before.status, after.status) == ("cancelled", "completed")


@pytest.mark.parametrize("forgotten", ["the job", "everything"])
async def test_a_record_superseded_by_a_retry_after_redis_forgot_the_job_keeps_no_offset_open(
    kafka: KafkaBroker, redis_server: RedisServer, forgotten: str
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    job = {"id": "J", "prompt": "x", "max_tokens": 150}
    async with running_worker(service.settings(deterministic_step_ms="10")) as worker:
        await service.publish([job])
        await service.wait_for_tokens("J", 5)
        with contextlib.closing(redis_server.client()) as client:
            if forgotten == "everything":
                client.flushdb()
            else:
                client.delete("tailrace:{J}:meta")
        await service.publish([job])
        await service.wait_for_results(["J"])
        assert worker.parts is not None
        consumer = worker.parts.consumer
        await eventually(lambda: consumer.stats().incomplete == 0, "both records are settled", limit_s=30)
    results = (await service.read_results())["J"]
    assert {result.choices[0].text for result in results} == {results[0].choices[0].text}
    assert {result.status for result in results} == {"completed"}
