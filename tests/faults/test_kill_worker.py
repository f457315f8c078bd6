"""kill -9 in the middle, with a real model: no job lost, none answered twice, no stream with a hole, and the same text.

The fault suite does the same with the deterministic engine.
"""

import pytest

from tests.support.kafka import KafkaBroker
from tests.support.processes import reap, serving_worker
from tests.support.redis import RedisServer
from tests.support.service import new_service, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.redis]

NUM_JOBS = 60

ENGINE = {"engine": "model", "num_threads": "1", "max_num_seqs": "16", "kv_cache_bytes": str(128 << 20)}
MIN_TOKENS = 40
TOKENS_BEFORE = 8
"""How far a stream has to be when its worker is killed."""


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_kill_nine_one_of_two_workers_of_smollm2_in_the_middle_of_sixty_jobs(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=8)
    jobs = [
        {
            "id": f"job-{i}",
            "prompt": f"Question {i}: why is the sky blue?",
            "max_tokens": MIN_TOKENS + i,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for i in range(NUM_JOBS)
    ]
    victim = service.spawn(worker_id="victim", **ENGINE)
    survivor = service.spawn(worker_id="survivor", **ENGINE)
    try:
        await serving_worker(service, "victim", "survivor")
        await service.publish(jobs)
        await service.first_job_of("victim", [job["id"] for job in jobs], tokens=TOKENS_BEFORE)
        victim.kill()
        results = await service.wait_for_results([job["id"] for job in jobs], limit_s=300)
        streams = {job_id: await service.read(job_id) for job_id in results}
    finally:
        reap(victim, survivor)

    assert len(results) == NUM_JOBS
    for job in jobs:
        result, stream = results[job["id"]], streams[job["id"]]
        assert result.status == "completed"
        assert {r.choices for r in service.results[job["id"]]} == {result.choices}, "two different results"
        assert stream.verdict.complete
        assert stream.verdict.problems == ()
        assert stream.gaps == []
        assert stream.text == result.choices[0].text
    taken_over = [job["id"] for job in jobs if results[job["id"]].attempt == 2]
    assert {results[job_id].worker for job_id in taken_over} == {"survivor"}
    resumed = max(streams[job_id].resumed[0] for job_id in taken_over)
    assert resumed >= TOKENS_BEFORE, "the survivor began again, it did not continue"

    async with running_worker(service.settings(**ENGINE)):
        again = [job | {"id": f"undisturbed-{job['id']}"} for job in jobs]
        await service.publish(again)
        undisturbed = await service.wait_for_results([job["id"] for job in again], limit_s=300)
    different = [
        job["id"]
        for job in jobs
        if undisturbed[f"undisturbed-{job['id']}"].choices != results[job["id"]].choices
    ]
    assert different == []
