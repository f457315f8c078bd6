"""A refusal does not hold its id: a corrected job may be sent under the same one."""

from typing import Any

import orjson
import pytest

from service.wire.job import fingerprint
from tests.support.kafka import KafkaBroker
from tests.support.members import eventually
from tests.support.raw_records import RawRecord, publish_batch
from tests.support.redis import RedisServer
from tests.support.service import ServiceUnderTest, new_service, running_worker
from tests.support.streams import running_publisher

pytestmark = [pytest.mark.kafka, pytest.mark.redis]

GOOD = {"id": "mended", "prompt": "x", "max_tokens": 4}
REFUSED: dict[str, Any] = {
    "unknown field": orjson.dumps(GOOD | {"temprature": 1}),
    "out of range": orjson.dumps(GOOD | {"max_tokens": -1}),
    "infeasible": orjson.dumps(GOOD | {"prompt": "x" * 5000}),
    "another model": orjson.dumps(GOOD | {"model": "gpt-9"}),
    "broken JSON": b'{"id": "mended", ',
    "too large": orjson.dumps(GOOD | {"prompt": "x" * (2 << 20)}),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_a_corrected_job_runs_under_the_id_of_the_refused_one(
    kafka: KafkaBroker, redis_server: RedisServer, why: str
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    async with running_worker(service.settings()):
        await service.publish_raw([(b"mended", REFUSED[why])])
        refused = (await service.wait_for_results(["mended"]))["mended"]
        first = await service.read("mended")
        await service.publish([GOOD, GOOD | {"id": "next"}])
        await service.wait_for_results(["next"])
        mended = await service.read("mended")
    assert refused.status in ("failed", "rejected")
    assert first.verdict.status == refused.status
    assert mended.verdict.complete
    results = (await service.read_results())["mended"]
    assert [result.status for result in results] == [refused.status, "completed"]
    assert mended.text == results[-1].choices[0].text
    assert mended.starts[0].epoch > first.starts[0].epoch


async def test_an_id_that_ran_is_held_whatever_its_outcome(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    async with running_worker(service.settings()):
        late = GOOD | {"id": "late", "deadline": "2020-01-01T00:00:00Z"}
        await service.publish([GOOD, late])
        await service.wait_for_results(["mended", "late"])
        await service.publish([GOOD | {"prompt": "y"}, GOOD, GOOD | {"id": "late"}, GOOD | {"id": "next"}])
        await service.wait_for_results(["next"])
    results = await service.read_results()
    assert [result.status for result in results["mended"]] == ["completed"]
    assert [result.status for result in results["late"]] == ["expired"]
    letters = await service.wait_for_dead_letters(2)
    assert {letter.origin.code for letter in letters} == {"duplicate_id"}


async def together(service: ServiceUnderTest, first: bytes, *, partitions: tuple[int, int]) -> list[str]:
    """The outcomes under one id of a record that is refused and a good one that follows at once."""
    topic = service.environ["TAILRACE_JOBS_TOPIC"]
    jobs = [RawRecord(b"mended", first), RawRecord(b"mended", orjson.dumps(GOOD))]
    for record, partition in zip(jobs, partitions, strict=True):
        await publish_batch(service.kafka.bootstrap, topic, partition, [record])
    async with running_worker(service.settings(worker_id="one")) as worker:
        assert worker.parts is not None
        consumer = worker.parts.consumer
        await eventually(lambda: consumer.stats().deliveries == 2, "both are fetched")
        await eventually(lambda: consumer.stats().incomplete == 0, "both are settled")
    return [result.status for result in (await service.read_results())["mended"]]


@pytest.mark.parametrize("partitions", [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("why", ["unknown field", "infeasible", "broken JSON"])
async def test_a_corrected_job_runs_even_if_fetched_together_with_the_refused_one(
    kafka: KafkaBroker, redis_server: RedisServer, why: str, partitions: tuple[int, int]
) -> None:
    """One of the two opens the id first, and may still be refused."""
    service = await new_service(kafka, redis_server, partitions=2)
    statuses = await together(service, REFUSED[why], partitions=partitions)
    assert statuses[-1] == "completed"
    assert statuses.count("completed") == 1


async def test_a_corrected_job_waits_for_the_refusal_of_a_record_whose_worker_died(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    """The dead worker had opened the id, and not refused the record yet."""
    service = await new_service(kafka, redis_server, partitions=1)
    topic, bad = service.environ["TAILRACE_JOBS_TOPIC"], REFUSED["infeasible"]
    async with running_worker(service.settings()) as worker:
        assert worker.parts is not None
        claim = worker.parts.claim
        await eventually(lambda: claim.held, "the namespace is claimed")
        deployment = worker.parts.publisher.deployment
    async with running_publisher(redis_server.url) as publisher:
        publisher.deployment = deployment
        await publisher.open(
            "mended", origin=f"{topic}/0/1@-1", fingerprint=fingerprint(bad), num_choices=1, stream=True
        )
    records = [RawRecord(b"mended", orjson.dumps(GOOD)), RawRecord(b"mended", bad)]
    await publish_batch(service.kafka.bootstrap, topic, 0, records)
    async with running_worker(service.settings()) as worker:
        assert worker.parts is not None
        consumer = worker.parts.consumer
        await eventually(lambda: consumer.stats().deliveries == 2, "both are fetched")
        await eventually(lambda: consumer.stats().incomplete == 0, "both are settled")
    assert [result.status for result in (await service.read_results())["mended"]] == ["rejected", "completed"]
