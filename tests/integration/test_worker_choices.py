"""Jobs with several choices through a worker: the prompt is computed once, and every way to end still holds."""

from typing import Any

import pytest
from redis.asyncio import Redis

from kernels.deterministic import expected_tokens
from service.stream.control import request_cancel
from service.wire import Result
from service.worker.worker import Worker
from tests.support.kafka import KafkaBroker
from tests.support.processes import reap
from tests.support.redis import RedisServer
from tests.support.service import Stream, new_service, running_worker
from tests.support.streams import NAMESPACE

pytestmark = [pytest.mark.kafka, pytest.mark.redis]

PROMPT = list(range(32, 132))
"""Ends within a block."""


def num_forks(worker: Worker) -> int:
    assert worker.parts is not None
    return worker.parts.engine.scheduler.stats().num_forks


def num_held(worker: Worker) -> int:
    assert worker.parts is not None
    return worker.parts.engine.scheduler.pool.num_held


def check_texts(result: Result, stream: Stream, num_choices: int, num_tokens: int) -> None:
    """Every choice equals a separate job, in the result and in the stream."""
    expected = expected_tokens(PROMPT, num_tokens)
    assert result.status == "completed"
    assert [choice.token_ids for choice in result.choices] == [expected] * num_choices
    assert stream.verdict.complete
    assert stream.gaps == []
    assert stream.assembler.texts() == [choice.text for choice in result.choices]


async def test_four_choices_share_one_prompt(kafka: KafkaBroker, redis_server: RedisServer) -> None:
    service = await new_service(kafka, redis_server)
    job = {"prompt_token_ids": PROMPT, "max_tokens": 40, "n": 4, "return_token_ids": True}
    async with running_worker(service.settings()) as worker:
        await service.publish([job | {"id": "first"}])
        first = (await service.wait_for_results(["first"]))["first"]
        assert num_forks(worker) == 3
        await service.publish([job | {"id": "again"}])
        again = (await service.wait_for_results(["again"]))["again"]
        assert num_forks(worker) == 6
        check_texts(first, await service.read("first"), 4, 40)
        check_texts(again, await service.read("again"), 4, 40)
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.cached_tokens) == (
        100,
        160,
        0,
    )
    assert (again.usage.prompt_tokens, again.usage.completion_tokens, again.usage.cached_tokens) == (
        100,
        160,
        96,
    )
    assert num_held(worker) == 0


async def test_a_cancelled_job_takes_all_its_choices_with_it(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server)
    redis = Redis.from_url(redis_server.url)
    job = {"prompt_token_ids": PROMPT, "max_tokens": 3000, "n": 4, "return_token_ids": True}
    async with running_worker(service.settings(deterministic_step_ms="5", max_num_seqs="3")) as worker:
        await service.publish([job | {"id": "gone"}])
        await service.wait_for_tokens("gone", 3)
        await request_cancel(redis, "gone", namespace=NAMESPACE)
        result = (await service.wait_for_results(["gone"]))["gone"]
        stream = await service.read("gone")
        await service.publish([job | {"id": "next", "max_tokens": 5}])
        check_texts((await service.wait_for_results(["next"]))["next"], await service.read("next"), 4, 5)
    await redis.aclose()
    assert result.status == "cancelled"
    assert [choice.finish_reason for choice in result.choices] == ["cancelled"] * 4
    lengths = [len(choice.token_ids or ()) for choice in result.choices]
    assert min(lengths[:3]) >= 1
    assert lengths[3] == 0, "three slots: the last choice was still waiting"
    assert stream.verdict.complete
    assert num_held(worker) == 0


async def test_after_kill_nine_every_choice_continues_where_its_stream_stopped(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    job = {"prompt_token_ids": PROMPT, "max_tokens": 400, "n": 3, "return_token_ids": True}
    victim = service.spawn(worker_id="victim", deterministic_step_ms="10")
    try:
        await service.publish([job | {"id": "taken-over"}])
        await service.wait_for_tokens("taken-over", 12)
        victim.kill()
        reap(victim)
        await service.forget_members()
        async with running_worker(service.settings()) as worker:
            result = (await service.wait_for_results(["taken-over"]))["taken-over"]
            stream = await service.read("taken-over")
            assert num_forks(worker) == 2
    finally:
        reap(victim)
    check_texts(result, stream, 3, 400)
    assert result.attempt == 2
    assert min(stream.resumed) >= 10
    assert result.usage.prompt_tokens == 100


FULL = {"max_num_seqs": "16", "max_waiting": "16"}
"""Slots for one job of 16 choices, places in the queue for another; more of them wait in the admission queue."""


async def test_hazard_a_backlog_of_many_choices_refuses_none(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    """Published before the worker starts, so that its first poll brings more choices than expected."""
    service = await new_service(kafka, redis_server)
    job_ids = [f"job-{number}" for number in range(12)]
    job = {"prompt_token_ids": PROMPT, "max_tokens": 3, "n": 16}
    await service.publish(job | {"id": job_id} for job_id in job_ids)
    async with running_worker(service.settings(deterministic_step_ms="1", **FULL)) as worker:
        results = await service.wait_for_results(job_ids)
    assert {job_id: results[job_id].status for job_id in job_ids} == dict.fromkeys(job_ids, "completed")
    assert {len(result.choices) for result in results.values()} == {16}
    assert num_held(worker) == 0


async def test_jobs_in_the_admission_queue_end_or_move_on_like_all_others(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    """One job runs, one fills the queue, and those that wait for it are cancelled, expire, or are handed back at the
    drain."""
    service = await new_service(kafka, redis_server, partitions=1)
    redis = Redis.from_url(redis_server.url)
    job = {"prompt_token_ids": PROMPT, "max_tokens": 1000, "n": 16}
    others: dict[str, dict[str, Any]] = {
        "in-line": {"max_tokens": 3, "return_token_ids": True}, "cancelled": {}, "late": {"deadline": 1},
    }  # fmt: skip
    names = ["running", "queued", *others]
    await service.publish(job | {"id": name} | others.get(name, {}) for name in names)
    slow = service.settings(deterministic_step_ms="20", drain_grace_s="0", **FULL)
    async with running_worker(slow) as worker:
        await service.wait_for_tokens("running", 2)
        await request_cancel(redis, "cancelled", namespace=NAMESPACE)
        results = await service.wait_for_results(["cancelled", "late"])
        assert worker.parts is not None
        stats = worker.parts.engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (16, 16), "nothing has left the queue meanwhile"
    async with running_worker(service.settings(**FULL)):
        results |= await service.wait_for_results(["running", "queued", "in-line"])
    await redis.aclose()
    assert {name: results[name].status for name in names} == {
        "running": "completed", "queued": "completed", "in-line": "completed",
        "cancelled": "cancelled", "late": "expired",
    }  # fmt: skip
    assert {choice.finish_reason for choice in results["cancelled"].choices} == {"cancelled"}
    check_texts(results["in-line"], await service.read("in-line"), 16, 3)
    assert results["in-line"].attempt == 2
