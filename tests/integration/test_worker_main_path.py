"""Jobs in Kafka, tokens in Redis, results in Kafka: one worker, real brokers, the deterministic engine."""

import hashlib
import time

import orjson
import pytest
from redis.asyncio import Redis

from service.stream.control import request_cancel
from service.wire.job import fingerprint
from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer
from tests.support.service import new_service, running_worker
from tests.support.streams import NAMESPACE, running_publisher

pytestmark = [pytest.mark.kafka, pytest.mark.redis]


@pytest.fixture(params=["off", "on"], autouse=True)
def async_scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, with the next step planned while one runs as well."""
    monkeypatch.setenv("TAILRACE_ASYNC_SCHEDULING", request.param)


async def test_a_job_ends_with_one_result_and_a_stream_that_proves_it(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server)
    jobs = [
        {"id": f"job-{i}", "prompt": f"document number {i}", "max_tokens": 20 + i, "metadata": {"row": i}}
        for i in range(12)
    ]
    async with running_worker(service.settings()):
        await service.publish(jobs)
        results = await service.wait_for_results([job["id"] for job in jobs])
        streams = {job_id: await service.read(job_id) for job_id in results}
    for i, job in enumerate(jobs):
        result, stream = results[job["id"]], streams[job["id"]]
        assert (result.status, result.choices[0].finish_reason) == ("completed", "length")
        assert result.usage.completion_tokens == job["max_tokens"]
        assert result.metadata == {"row": i}
        assert stream.verdict.complete
        assert stream.gaps == []
        assert stream.text == result.choices[0].text
        end = stream.assembler.end
        assert end is not None
        assert end.text_sha256 == (hashlib.sha256(result.choices[0].text.encode()).hexdigest(),)
    assert all(len(service.results[job["id"]]) == 1 for job in jobs)


async def test_a_cancelled_job_ends_cancelled_whether_it_runs_or_was_never_fetched(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server)
    redis = Redis.from_url(redis_server.url)
    async with running_worker(service.settings(deterministic_step_ms="5")):
        await request_cancel(redis, "early", namespace=NAMESPACE)
        await service.publish(
            [
                {"id": "running", "prompt": "x", "max_tokens": 3000},
                {"id": "early", "prompt": "x", "max_tokens": 3000},
                {"id": "bystander", "prompt": "x", "max_tokens": 30},
            ]
        )
        await service.wait_for_tokens("running", 3)
        await request_cancel(redis, "running", namespace=NAMESPACE)
        results = await service.wait_for_results(["running", "early", "bystander"])
        streams = {job_id: await service.read(job_id) for job_id in results}
    await redis.aclose()
    assert {job_id: result.status for job_id, result in results.items()} == {
        "running": "cancelled",
        "early": "cancelled",
        "bystander": "completed",
    }
    assert 0 < results["running"].usage.completion_tokens < 3000
    assert results["early"].usage.completion_tokens == 0
    assert all(stream.verdict.complete for stream in streams.values())


async def test_a_job_past_its_deadline_ends_expired_without_a_token(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server)
    await service.publish([{"id": "late", "prompt": "x", "deadline": "2020-01-01T00:00:00Z"}])
    async with running_worker(service.settings()):
        results = await service.wait_for_results(["late"])
    assert results["late"].status == "expired"
    assert results["late"].usage.completion_tokens == 0


async def test_a_stop_string_ends_the_text_before_it(kafka: KafkaBroker, redis_server: RedisServer) -> None:
    service = await new_service(kafka, redis_server)
    async with running_worker(service.settings()):
        prompt = "x" * 100
        await service.publish([{"id": "whole", "prompt": prompt, "max_tokens": 60}])
        whole = (await service.wait_for_results(["whole"]))["whole"].choices[0].text
        stop = whole[20:24]
        await service.publish([{"id": "cut", "prompt": prompt, "max_tokens": 60, "stop": [stop]}])
        cut = (await service.wait_for_results(["cut"]))["cut"]
        stream = await service.read("cut")
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.cached_tokens > 0, "a stop string ends the request before the scheduler does"
    assert stream.text == cut.choices[0].text
    assert stream.verdict.complete


async def test_n_choices_share_one_stream_and_one_result(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server)
    async with running_worker(service.settings()):
        await service.publish(
            [{"id": "three", "prompt": "x", "max_tokens": 10, "n": 3, "return_token_ids": True}]
        )
        result = (await service.wait_for_results(["three"]))["three"]
        stream = await service.read("three")
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    assert [len(choice.token_ids or ()) for choice in result.choices] == [10, 10, 10]
    assert stream.assembler.texts() == [choice.text for choice in result.choices]
    assert stream.verdict.complete


async def test_a_retried_record_is_suppressed_and_another_job_with_its_id_cannot_replace_its_result(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    first = {"id": "twin", "prompt": "the first", "max_tokens": 5}
    async with running_worker(service.settings()):
        await service.publish([first])
        original = (await service.wait_for_results(["twin"]))["twin"]
        await service.publish([first, {"id": "twin", "prompt": "an impostor", "max_tokens": 9}])
        topic = service.environ["TAILRACE_JOBS_TOPIC"]
        refusal_id = f"duplicate:{topic}:0:2"
        refusal = (await service.wait_for_results([refusal_id, "twin"]))[refusal_id]
        letters = await service.wait_for_dead_letters(1)
    assert service.results["twin"] == [original]
    assert refusal.status == "rejected"
    assert refusal.error is not None
    assert (refusal.error.code, refusal.error.field, refusal.error.value) == ("duplicate_id", "id", "twin")
    assert [letter.origin.code for letter in letters] == ["duplicate_id"]
    assert orjson.loads(letters[0].value or b"")["prompt"] == "an impostor"


async def test_drain_finishes_the_jobs_that_fit_and_hands_back_the_others(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    slow = {"id": "long", "prompt": "x", "max_tokens": 3000}
    async with running_worker(service.settings(deterministic_step_ms="5", drain_grace_s="5")) as worker:
        await service.publish([slow])
        await service.wait_for_tokens("long", 5)
        worker.stop()
    async with running_worker(service.settings()):
        result = (await service.wait_for_results(["long"]))["long"]
        stream = await service.read("long")
    undisturbed = {"id": "again", "prompt": "x", "max_tokens": 3000}
    async with running_worker(service.settings()):
        await service.publish([undisturbed])
        again = (await service.wait_for_results(["again"]))["again"]
    assert (result.status, result.attempt) == ("completed", 2)
    assert result.usage.completion_tokens == 3000
    assert result.choices[0].text == again.choices[0].text == stream.text
    assert stream.verdict.complete


async def test_tokens_of_another_tokenizer_are_dropped_and_readers_see_it(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    topic = service.environ["TAILRACE_JOBS_TOPIC"]
    record = {"id": "moved", "prompt": "x", "max_tokens": 12}
    value, stamp = orjson.dumps(record), int(time.time() * 1000)
    # What a worker with another model left behind: ids whose text is not this tokenizer's.
    async with running_publisher(redis_server.url) as publisher:
        opened = await publisher.open(
            "moved", origin=f"{topic}/0/0@{stamp}", fingerprint=fingerprint(value), num_choices=1, stream=True
        )
        assert opened.stream is not None
        opened.stream.start()
        opened.stream.delta(0, "Bonjour", [11, 22])
        assert await opened.stream.flushed()
    async with running_worker(service.settings()):
        await service.publish_raw([(b"moved", value)], timestamp_ms=stamp)
        result = (await service.wait_for_results(["moved"]))["moved"]
        stream = await service.read("moved")
    assert stream.resumed == (0,)
    assert "Bonjour" not in stream.text
    assert stream.text == result.choices[0].text
    assert stream.verdict.complete
    assert result.usage.completion_tokens == 12
