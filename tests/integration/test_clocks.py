"""Machines whose clocks disagree: jobs run, deadlines hold, and no result is refused for its timestamp."""

import time
from collections.abc import Callable

import orjson
import pytest

from service.worker.namespace import SharedClock
from tests.support.kafka import KafkaBroker
from tests.support.members import config_for, eventually, running_producer
from tests.support.redis import RedisServer
from tests.support.service import new_service, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.redis]

THREE_HOURS_S = 3 * 3600


def ahead(by_s: float) -> Callable[[], float]:
    return lambda: time.time() + by_s


@pytest.mark.parametrize("by_s", [THREE_HOURS_S, -THREE_HOURS_S])
async def test_a_worker_whose_clock_is_wrong_serves_like_any_other(
    kafka: KafkaBroker, redis_server: RedisServer, by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.worker.assembly.SharedClock", lambda: SharedClock(ahead(by_s)))
    service = await new_service(kafka, redis_server, partitions=1)
    jobs = [{"id": f"job-{i}", "prompt": "x", "max_tokens": 4, "deadline": 20.0} for i in range(20)]
    async with running_worker(service.settings()) as worker:
        await service.publish(jobs)
        results = await service.wait_for_results([job["id"] for job in jobs])
        await eventually(lambda: not worker.readiness.reasons(), "the worker is ready")
        assert worker.parts is not None
        assert worker.parts.producer.stats().rebuilds == 0
    assert {result.status for result in results.values()} == {"completed"}
    assert all((result.timings.e2e_s or 0.0) < 60 for result in results.values())


async def test_control_by_the_workers_own_clock_every_deadline_would_have_passed(
    kafka: KafkaBroker, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.worker.assembly.SharedClock", lambda: SharedClock(ahead(THREE_HOURS_S)))
    monkeypatch.setattr(SharedClock, "set", lambda *_: None)
    service = await new_service(kafka, redis_server, partitions=1)
    async with running_worker(service.settings()):
        await service.publish([{"id": "job", "prompt": "x", "max_tokens": 4, "deadline": 20.0}])
        assert (await service.wait_for_results(["job"]))["job"].status == "expired"


async def test_a_timestamp_that_the_broker_refuses_is_left_out_and_breaks_no_connection(
    kafka: KafkaBroker,
) -> None:
    """Redis's clock may be the wrong one."""
    config = config_for(kafka, "unused", results_topic=await kafka.new_topic())
    producer = running_producer(config, wall_clock=ahead(THREE_HOURS_S))
    for number in range(50):
        await producer.send(config.results_topic, b"%d" % number, b"value")
    assert producer.problem is None
    assert producer.stats().rebuilds == 1, "only for the first"
    await producer.stop()


@pytest.mark.parametrize("stamp", [-1, 0, 1, 1_790_000_000, 1_790_000_000_000_000, 253_402_300_800_000])
async def test_an_invalid_timestamp_makes_no_job_old_or_broken(
    kafka: KafkaBroker, redis_server: RedisServer, stamp: int
) -> None:
    service = await new_service(
        kafka, redis_server, partitions=1, message_timestamp_after_max_ms=str((1 << 63) - 1)
    )
    chat = {"id": "chat", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    timed = {"id": "timed", "prompt": "x", "max_tokens": 4, "deadline": 60.0}
    async with running_worker(service.settings()):
        await service.publish_raw(
            [(job["id"].encode(), orjson.dumps(job)) for job in (chat, timed)], timestamp_ms=stamp
        )
        results = await service.wait_for_results(["chat", "timed"])
    assert results["chat"].status == "completed"
    assert (results["chat"].timings.e2e_s or 0.0) < 60
    refused = results["timed"]
    assert (refused.status, refused.error and refused.error.field) == ("rejected", "deadline")
