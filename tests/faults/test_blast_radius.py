"""A job that breaks something of ours ends by itself; the others do not notice."""

import time
from typing import Any

import orjson
import pytest

from kernels.deterministic import DeterministicRunner
from kernels.runner import FinishedStep
from scheduler.plan import StepPlan
from service.wire import decode
from service.wire.job import fingerprint
from service.worker.worker import Worker
from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer
from tests.support.service import new_service, running_worker
from tests.support.streams import eventually, running_publisher

pytestmark = [pytest.mark.kafka, pytest.mark.redis]

BYSTANDER = {"id": "bystander", "prompt": "x", "max_tokens": 20}


async def test_a_result_too_large_for_its_topic_fails_the_job_and_no_other(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    service.environ["TAILRACE_RESULTS_TOPIC"] = await kafka.new_topic(1, max_message_bytes="4000")
    async with running_worker(service.settings()):
        await service.publish([{"id": "huge", "prompt": "x", "max_tokens": 3000, "logprobs": 5}, BYSTANDER])
        results = await service.wait_for_results(["huge", "bystander"])
        stream = await service.read("huge")
    assert (results["huge"].status, results["bystander"].status) == ("failed", "completed")
    assert results["huge"].error is not None
    assert results["huge"].error.code == "record_too_large"
    assert stream.verdict.status == "failed"


async def test_a_job_that_takes_its_workers_down_is_not_passed_on_for_ever(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    value, stamp = orjson.dumps({"id": "poison", "prompt": "x", "max_tokens": 5}), int(time.time() * 1000)
    origin = f"{service.environ['TAILRACE_JOBS_TOPIC']}/0/0@{stamp}"
    async with running_publisher(redis_server.url) as publisher:
        for _ in range(3):  # Each attempt began and was never heard of again.
            await publisher.open(
                "poison", origin=origin, fingerprint=fingerprint(value), num_choices=1, stream=True
            )
    async with running_worker(service.settings(max_attempts="3")):
        await service.publish_raw([(b"poison", value)], timestamp_ms=stamp)
        await service.publish([BYSTANDER])
        results = await service.wait_for_results(["poison", "bystander"])
    poison = results["poison"]
    assert (poison.status, results["bystander"].status) == ("failed", "completed")
    assert poison.error is not None
    assert (poison.error.code, poison.error.value, poison.error.limit) == ("too_many_attempts", 4, 3)


async def test_keys_of_somebody_else_under_a_jobs_id_fail_that_job_and_no_other(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    with redis_server.client() as client:
        client.set("tailrace:{squatted}:meta", "not a hash")
    async with running_worker(service.settings()):
        await service.publish([{"id": "squatted", "prompt": "x"}, BYSTANDER])
        refusal_id = f"unparsed:{service.environ['TAILRACE_JOBS_TOPIC']}:0:0"
        results = await service.wait_for_results([refusal_id, "bystander"])
    assert results["bystander"].status == "completed"
    assert results[refusal_id].error is not None
    assert results[refusal_id].error.code == "stream_conflict"


async def test_a_log_that_redis_refuses_costs_the_job_its_stream_and_not_its_result(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    with redis_server.client() as client:
        client.set("tailrace:{deaf}:log", "not a stream")
    async with running_worker(service.settings(deterministic_step_ms="2")) as worker:
        await service.publish([{"id": "deaf", "prompt": "x", "max_tokens": 60}, BYSTANDER])
        results = await service.wait_for_results(["deaf", "bystander"])
        assert worker.parts is not None
        await eventually(lambda: worker.parts is not None and not len(worker.parts.table), "both are settled")
    assert {result.status for result in results.values()} == {"completed"}
    assert results["deaf"].usage.completion_tokens == 60


async def test_being_handed_back_again_and_again_is_no_fault_of_the_job(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    await service.publish([{"id": "patient", "prompt": "x", "max_tokens": 400}])
    for _ in range(3):
        async with running_worker(service.settings(deterministic_step_ms="20", max_attempts="1")) as worker:
            await eventually(lambda: _has_epoch(worker), "the job is opened", limit_s=15)
            worker.stop()
            worker.stop()  # At once, whatever still runs.
    async with running_worker(service.settings(max_attempts="1")):
        results = await service.wait_for_results(["patient"])
    assert (results["patient"].status, results["patient"].attempt) == ("completed", 4)


def _has_epoch(worker: Worker) -> bool:
    return worker.parts is not None and any(run.epoch for run in worker.parts.table)


async def test_a_bug_of_ours_ends_the_one_job_it_shows_up_in(
    kafka: KafkaBroker, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = decode.orjson.loads

    def sometimes_broken(data: bytes) -> Any:
        if b"unlucky" in data:
            raise ZeroDivisionError("nobody expected this")
        return load(data)

    service = await new_service(kafka, redis_server, partitions=1)
    async with running_worker(service.settings()):
        with monkeypatch.context() as patch:
            patch.setattr("service.wire.decode.orjson.loads", sometimes_broken)
            await service.publish([{"id": "unlucky", "prompt": "x"}, BYSTANDER])
            refusal_id = f"unparsed:{service.environ['TAILRACE_JOBS_TOPIC']}:0:0"
            results = await service.wait_for_results([refusal_id, "bystander"])
    assert results["bystander"].status == "completed"
    assert results[refusal_id].status == "rejected"
    assert results[refusal_id].error is not None
    assert results[refusal_id].error.code == "internal_error"


@pytest.mark.parametrize("ahead", ["off", "on"])
async def test_hazard_a_job_whose_choices_all_break_the_step_takes_the_worker_down(
    kafka: KafkaBroker, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, ahead: str
) -> None:
    begin = DeterministicRunner.begin

    def broken(runner: DeterministicRunner, plan: StepPlan) -> FinishedStep:
        if any(row.request_id.startswith("poison") and row.num_generated_tokens > 1 for row in plan.rows):
            raise ZeroDivisionError("in a kernel")
        return begin(runner, plan)

    monkeypatch.setattr(DeterministicRunner, "begin", broken)
    service = await new_service(kafka, redis_server, partitions=1)
    async with running_worker(service.settings(async_scheduling=ahead)):
        await service.publish([{"id": "poison", "prompt": "x" * 40, "max_tokens": 9, "n": 4}])
        poison = (await service.wait_for_results(["poison"]))["poison"]
        await service.publish([BYSTANDER])
        bystander = (await service.wait_for_results(["bystander"]))["bystander"]
    assert (poison.status, bystander.status) == ("failed", "completed")
    assert poison.error is not None
    assert poison.error.code == "engine_error"
