"""Callers that wait for results never wait for a dead consumer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from service.client.result_topic import ResultFollower
from service.errors import InternalError
from service.ingest import KafkaConfig
from service.wire import Result
from tests.support.kafka import KafkaBroker
from tests.support.members import config_for

pytestmark = pytest.mark.kafka

LIMIT_S = 40


@pytest.fixture
async def config(kafka: KafkaBroker) -> KafkaConfig:
    return config_for(kafka, "unused", results_topic=await kafka.new_topic())


@pytest.fixture
async def follower(config: KafkaConfig) -> AsyncIterator[ResultFollower]:
    follower = ResultFollower(config)
    await follower.start()
    yield follower
    await follower.stop()


async def write(config: KafkaConfig, job_id: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=config.kafka_bootstrap, acks="all") as producer:
        result = Result(job_id, "completed", 1, "w")
        await producer.send_and_wait(config.results_topic, result.encode(), key=job_id.encode())


async def test_a_broker_that_restarts_costs_no_waiter_its_result(
    kafka: KafkaBroker, config: KafkaConfig, follower: ResultFollower
) -> None:
    try:
        for round_ in range(2):
            awaited = follower.expect(f"job-{round_}")
            await asyncio.to_thread(kafka.kill)
            await asyncio.to_thread(kafka.start)
            await write(config, f"job-{round_}")
            assert (await asyncio.wait_for(awaited, LIMIT_S)).id == f"job-{round_}"
    finally:
        kafka.start()


@pytest.mark.parametrize("error", [RuntimeError("unexpected"), AssertionError("unexpected")])
async def test_a_consumer_that_fails_in_an_unexpected_way_is_replaced(
    config: KafkaConfig, follower: ResultFollower, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited = follower.expect("job")

    async def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(follower._consumer, "getmany", fail)
    await write(config, "job")
    assert (await asyncio.wait_for(awaited, LIMIT_S)).id == "job"


async def test_a_consumer_stopped_from_outside_is_replaced(
    config: KafkaConfig, follower: ResultFollower
) -> None:
    awaited = follower.expect("job")
    assert follower._consumer is not None
    await follower._consumer.stop()
    await write(config, "job")
    assert (await asyncio.wait_for(awaited, LIMIT_S)).id == "job"


async def test_waiters_get_an_error_when_no_consumer_works(
    follower: ResultFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise RuntimeError("broken for good")

    monkeypatch.setattr(follower, "_poll", fail)
    with pytest.raises(InternalError, match="broken for good"):
        await asyncio.wait_for(follower.expect("job"), LIMIT_S)
