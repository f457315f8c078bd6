"""Kafka or Redis away, at the start or in the middle: nothing is lost, nothing is answered twice, no crash."""

import asyncio
import socket

import aiohttp
import pytest

from tests.support.kafka import KafkaBroker
from tests.support.proxy import running_proxy
from tests.support.redis import RedisServer
from tests.support.service import new_service, running_worker
from tests.support.streams import eventually

pytestmark = [pytest.mark.kafka, pytest.mark.redis]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


async def ready_reasons(port: str) -> dict[str, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/readyz") as answer:
        body = await answer.json()
    assert (answer.status == 200) == (body["reasons"] == {})
    return dict(body["reasons"])


async def test_a_worker_that_starts_without_kafka_and_redis_waits_and_serves_when_they_come(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server)
    await service.publish([{"id": "early", "prompt": "x", "max_tokens": 5}])
    redis_server.stop()
    await asyncio.to_thread(kafka.stop)
    try:
        port = free_port()
        async with running_worker(service.settings(admin_port=port)) as worker:
            reasons = await ready_reasons(port)
            assert {"kafka", "redis"} <= reasons.keys()
            redis_server.start()
            await asyncio.to_thread(kafka.start)
            await eventually(lambda: not worker.readiness.reasons(), "the worker is ready", limit_s=30)
            assert await ready_reasons(port) == {}
            results = await service.wait_for_results(["early"])
    finally:
        redis_server.start()
        await asyncio.to_thread(kafka.start)
    assert results["early"].status == "completed"


async def test_a_slow_redis_delays_the_streams_but_not_the_steps(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server)
    async with (
        running_proxy(redis_server.port) as proxy,
        running_worker(service.settings(redis_url=proxy.url, deterministic_step_ms="2")) as worker,
    ):
        await service.publish([{"id": "long", "prompt": "x", "max_tokens": 400}])
        await service.wait_for_tokens("long", 3)
        proxy.stall("to_server")
        tokens = worker.metrics.output_tokens._value
        # All of them exist before Redis gets another one.
        await eventually(
            lambda: tokens.get() == 400, "generation finishes while Redis takes nothing", limit_s=30
        )
        await eventually(lambda: "redis" in worker.readiness.reasons(), "the worker says that Redis is stuck")
        proxy.resume()
        result = (await service.wait_for_results(["long"]))["long"]
        stream = await service.read("long")
    assert result.status == "completed"
    assert stream.verdict.complete
    assert stream.text == result.choices[0].text
