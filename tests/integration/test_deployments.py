"""Deployments that share a Redis never affect each other by accident."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from service.errors import SettingsError
from service.stream.assemble import StreamAssembler
from service.stream.control import request_cancel
from service.stream.reader import Verdict, read_stream
from service.worker.worker import Worker
from tests.support.configs import stream_config
from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer
from tests.support.service import ServiceUnderTest, new_service, running_worker
from tests.support.streams import NAMESPACE

pytestmark = [pytest.mark.kafka, pytest.mark.redis]


def job(text: str, **fields: Any) -> dict[str, Any]:
    return {"id": "same", "prompt": text, "max_tokens": 8} | fields


async def stream_of(
    service: ServiceUnderTest, job_id: str, namespace: str = "tailrace"
) -> tuple[str, Verdict]:
    assembler = StreamAssembler(job_id)
    async with (
        Redis.from_url(service.environ["TAILRACE_REDIS_URL"]) as redis,
        asyncio.timeout(30),
        contextlib.aclosing(
            read_stream(redis, job_id, assembler=assembler, config=stream_config(namespace=namespace))
        ) as items,
    ):
        async for item in items:
            if isinstance(item, Verdict):
                return assembler.choice(0).text, item
    raise AssertionError("a stream ends in a verdict")


async def test_a_second_deployment_in_the_same_namespace_refuses_to_start_in_one_sentence(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    first, second = await new_service(kafka, redis_server), await new_service(kafka, redis_server)
    async with running_worker(first.settings()), running_worker(first.settings(worker_id="colleague")):
        await first.publish([job("first")])
        assert (await first.wait_for_results(["same"]))["same"].status == "completed"
        with pytest.raises(SettingsError) as refused:
            await Worker(second.settings()).run()
        await first.publish([job("first") | {"id": "after"}])
        assert (await first.wait_for_results(["after"]))["after"].status == "completed"
    message = str(refused.value)
    assert message.startswith(
        "TAILRACE_NAMESPACE is 'tailrace': another deployment uses it in this Redis (group "
    )
    assert first.environ["TAILRACE_JOBS_TOPIC"] in message
    assert "\n" not in message


async def test_deployments_with_separate_namespaces_may_use_the_same_ids(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    one, two = await new_service(kafka, redis_server), await new_service(kafka, redis_server)
    slow = {"deterministic_step_ms": "20"}
    async with (
        running_worker(one.settings(namespace="one", **slow)),
        running_worker(two.settings(namespace="two", **slow)),
        Redis.from_url(redis_server.url) as redis,
    ):
        await one.publish([job("first", max_tokens=60)])
        await two.publish([job("second", max_tokens=60)])
        await request_cancel(redis, "same", namespace="one")
        results = [(await each.wait_for_results(["same"]))["same"] for each in (one, two)]
        streams = [await stream_of(each, "same", name) for each, name in ((one, "one"), (two, "two"))]
    assert [result.status for result in results] == ["cancelled", "completed"]
    for result, (text, verdict) in zip(results, streams, strict=True):
        assert verdict.complete
        assert verdict.status == result.status
        if result.choices:
            assert result.choices[0].text == text


async def test_deployments_in_two_databases_of_one_redis_neither_cancel_nor_mix(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    zero, one = await new_service(kafka, redis_server), await new_service(kafka, redis_server)
    one = replace(one, environ=one.environ | {"TAILRACE_REDIS_URL": redis_server.url.replace("/0", "/1")})
    slow = {"deterministic_step_ms": "20"}
    async with (
        running_worker(zero.settings(**slow)),
        running_worker(one.settings(**slow)),
        Redis.from_url(one.environ["TAILRACE_REDIS_URL"]) as redis,
    ):
        readers = [asyncio.create_task(stream_of(each, "same")) for each in (zero, one)]
        await zero.publish([job("first", max_tokens=60)])
        await one.publish([job("second", max_tokens=400)])
        await request_cancel(redis, "same", namespace=NAMESPACE)
        results = [(await each.wait_for_results(["same"]))["same"] for each in (zero, one)]
        streams = [await reader for reader in readers]
    assert [result.status for result in results] == ["completed", "cancelled"]
    assert [verdict.complete for _, verdict in streams] == [True, True]
    assert streams[0][0] == results[0].choices[0].text


async def test_an_id_that_ended_in_a_former_deployment_gets_a_result_in_the_next(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    former, now = await new_service(kafka, redis_server), await new_service(kafka, redis_server)
    async with running_worker(former.settings()):
        await former.publish([job("first")])
        before = (await former.wait_for_results(["same"]))["same"]
    with contextlib.closing(redis_server.client()) as client:
        client.delete("tailrace:deployment")  # what some seconds without a worker do
    with capture_logs() as lines:
        async with running_worker(now.settings()):
            await now.publish([job("first"), job("first")])
            after = (await now.wait_for_results(["same"]))["same"]
            stream = await now.read("same")
    assert after.choices[0].text == before.choices[0].text == stream.text
    assert stream.verdict.complete
    assert len((await now.read_results())["same"]) == 1
    suppressed = [line for line in lines if line["event"] == "duplicate_suppressed"]
    assert [line["job_id"] for line in suppressed] == ["same"]
