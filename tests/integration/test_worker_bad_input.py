"""Every record on the jobs topic ends in one result; a refusal names field, value and limit, and the worker
continues."""

from typing import Any

import orjson
import pytest

from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer
from tests.support.service import new_service, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.redis]

MODEL_LEN = 512
POOL_TOKENS = 256
"""Smaller than the model length, so that each limit can be exceeded by itself."""


def job(job_id: str, **fields: Any) -> tuple[bytes, bytes]:
    return job_id.encode(), orjson.dumps({"id": job_id, "prompt": "fine", "max_tokens": 4} | fields)


def raw(job_id: str, value: bytes) -> tuple[bytes, bytes]:
    return job_id.encode(), value


# id: (record, status, field, has a dead letter)
CASES: dict[str, tuple[tuple[bytes | None, bytes | None], str, str, bool]] = {
    "broken-json": (raw("broken-json", b'{"id": "broken-json", '), "failed", "value", True),
    "invalid-utf8": (
        raw("invalid-utf8", b'{"id": "invalid-utf8", "prompt": "\xff"}'),
        "failed",
        "value",
        True,
    ),
    "a-list": (raw("a-list", b"[1, 2]"), "failed", "value", True),
    "tombstone": ((b"tombstone", None), "failed", "value", True),
    "ten-megabytes": (
        raw("ten-megabytes", b'{"id": "ten-megabytes", "prompt": "' + b"x" * (10 << 20) + b'"}'),
        "failed",
        "value",
        True,
    ),
    "unknown-field": (job("unknown-field", temprature=1), "rejected", "temprature", True),
    "wrong-type": (job("wrong-type", max_tokens="four"), "rejected", "max_tokens", True),
    "bool-as-int": (job("bool-as-int", max_tokens=True), "rejected", "max_tokens", True),
    "empty-prompt": (job("empty-prompt", prompt=""), "rejected", "prompt", True),
    "two-prompts": (job("two-prompts", prompt_token_ids=[1]), "rejected", "prompt", True),
    "nan": (
        raw("nan", b'{"id": "nan", "prompt": "x", "temperature": NaN}'),
        "rejected",
        "temperature",
        True,
    ),
    "infinity": (
        raw("infinity", b'{"id": "infinity", "prompt": "x", "top_p": -Infinity}'),
        "rejected",
        "top_p",
        True,
    ),
    "negative": (job("negative", max_tokens=-1), "rejected", "max_tokens", True),
    "huge-int": (
        raw("huge-int", b'{"id": "huge-int", "prompt": "x", "seed": ' + b"9" * 400 + b"}"),
        "rejected",
        "seed",
        True,
    ),
    "many-stops": (job("many-stops", stop=[str(i) for i in range(10_000)]), "rejected", "stop", True),
    "unknown-role": (
        raw("unknown-role", b'{"id": "unknown-role", "messages": [{"role": "wizard", "content": "x"}]}'),
        "rejected",
        "messages[0].role",
        True,
    ),
    "unknown-model": (job("unknown-model", model="gpt-9"), "rejected", "model", False),
    "over-model-length": (
        job("over-model-length", prompt="x" * 600),
        "rejected",
        "prompt + max_tokens",
        False,
    ),
    "over-pool": (job("over-pool", max_tokens=400), "rejected", "prompt + max_tokens", False),
    "token-id-too-high": (
        raw("token-id-too-high", b'{"id": "token-id-too-high", "prompt_token_ids": [9999]}'),
        "rejected",
        "prompt_token_ids",
        False,
    ),
}


async def test_every_bad_record_ends_in_one_result_that_says_why(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    good = ["good-before", "good-after"]
    bad_id = (b"no id of ours", orjson.dumps({"id": "spaces are outside", "prompt": "x"}))
    records = [job("good-before"), *(record for record, *_ in CASES.values()), bad_id, job("good-after")]
    pool_bytes = str(POOL_TOKENS * 4096)
    async with running_worker(
        service.settings(max_model_len=str(MODEL_LEN), kv_cache_bytes=str(max(1 << 20, int(pool_bytes))))
    ):
        await service.publish_raw(records)
        unparsed = f"unparsed:{service.environ['TAILRACE_JOBS_TOPIC']}:0:{len(records) - 2}"
        results = await service.wait_for_results([*good, *CASES, unparsed])
        letters = await service.wait_for_dead_letters(1 + sum(case[3] for case in CASES.values()))
        streams = {job_id: await service.read(job_id) for job_id in [*CASES, unparsed]}

    assert [results[job_id].status for job_id in good] == ["completed", "completed"]
    for job_id, (record, status, field, has_letter) in CASES.items():
        result = results[job_id]
        assert len(service.results[job_id]) == 1, job_id
        assert result.error is not None, job_id
        assert (result.status, result.error.field) == (status, field), (job_id, result.error)
        assert result.error.limit is not None, job_id
        assert str(result.error.field) in result.error.message, job_id
        matching = [letter for letter in letters if letter.key == record[0]]
        assert len(matching) == has_letter, job_id
        assert all(letter.value == record[1] for letter in matching), job_id
        assert streams[job_id].verdict.complete, job_id
        assert streams[job_id].verdict.status == status, job_id
    assert results[unparsed].status == "rejected"
    assert results[unparsed].error is not None
    assert results[unparsed].error.field == "id"


async def test_a_broken_record_cannot_overwrite_the_result_of_the_job_whose_id_it_carries(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    async with running_worker(service.settings()):
        await service.publish_raw([job("mine")])
        original = (await service.wait_for_results(["mine"]))["mine"]
        await service.publish_raw([raw("mine", b"{"), job("after")])
        unparsed = f"unparsed:{service.environ['TAILRACE_JOBS_TOPIC']}:0:1"
        results = await service.wait_for_results(["mine", "after", unparsed])
    assert original.status == "completed"
    assert service.results["mine"] == [original]
    assert results[unparsed].status == "failed"
    assert results["after"].status == "completed"
