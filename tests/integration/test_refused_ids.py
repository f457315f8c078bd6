"""A refusal does not hold its id: whoever mends a job may send it again under the same one."""

from typing import Any

import orjson
import pytest

from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer
from tests.support.service import new_service, running_worker

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
async def test_a_mended_job_runs_under_the_id_of_the_refused_one(
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
