"""A job on its way through the worker, on fakes: which writes happen, in which order, and what stops them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

from scheduler.spec import FinishReason, RequestUpdate
from service.errors import DependencyError, InternalError, JobError
from service.stream.assemble import ResumedChoice
from service.stream.publisher import Opened, Outcome
from service.wire import parse_result
from service.worker.job_run import JobRun
from tests.service.worker.fakes import FakeWorker
from tests.support.streams import eventually

JOB: dict[str, Any] = {"id": "job", "prompt": "x", "max_tokens": 3}


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = FakeWorker()
    yield fake
    await fake.close()


def job(**fields: Any) -> bytes:
    return orjson.dumps(JOB | fields)


async def running(worker: FakeWorker, **fields: Any) -> str:
    """Delivers a job; returns the id of its request once the engine has it."""
    worker.deliver(job(**fields))
    await eventually(lambda: bool(worker.engine.specs), "the job is in the engine")
    return next(iter(worker.engine.specs))


def tokens(request_id: str, *token_ids: int, finish: FinishReason | None = None) -> RequestUpdate:
    return RequestUpdate(request_id, token_ids, finish=finish)


async def test_result_is_decided_then_durable_then_ended_then_complete(worker: FakeWorker) -> None:
    request_id = await running(worker)
    worker.flow.on_updates([tokens(request_id, 97, 98, 99, finish=FinishReason.LENGTH)])
    await eventually(lambda: bool(worker.completed), "the record is settled")
    assert worker.names() == ["start", "delta", "decide", "results", "end", "complete"]
    sent = dict(worker.log)
    assert sent["decide"] == sent["results"], "what is sent is what was decided, to the byte"
    assert parse_result(sent["results"]).choices[0].text == "abc"
    assert len(worker.table) == 0


async def test_a_newer_attempt_before_the_decision_stops_everything(worker: FakeWorker) -> None:
    request_id = await running(worker)
    worker.publisher.streams[0].fenced = True
    worker.flow.on_updates([tokens(request_id, 97, finish=FinishReason.STOP)])
    await eventually(lambda: not worker.flow._tasks, "the attempt has ended")
    assert worker.names() == ["start", "delta"]
    assert worker.completed == []


async def test_a_send_of_a_job_that_was_lost_to_another_worker_is_withdrawn(worker: FakeWorker) -> None:
    request_id = await running(worker)
    worker.producer.may_send.clear()
    worker.flow.on_updates([tokens(request_id, 97, finish=FinishReason.STOP)])
    await eventually(lambda: "decide" in worker.names(), "it is decided")
    worker.flow.on_lost([("jobs", 0)])
    worker.producer.may_send.set()
    await eventually(lambda: not worker.flow._tasks, "the attempt has ended")
    assert worker.names() == ["start", "delta", "decide", "abandon"]


@pytest.mark.parametrize("value", [job(), None], ids=["runs", "is refused"])
async def test_a_job_that_is_lost_while_its_stream_is_opened_leaves_nothing_behind(
    worker: FakeWorker, value: bytes | None
) -> None:
    may_open, open_at_once = asyncio.Event(), worker.publisher.open
    asked = asyncio.Event()

    async def open_later(job_id: str, **fields: Any) -> Opened:
        asked.set()
        await may_open.wait()
        return await open_at_once(job_id, **fields)

    worker.publisher.open = open_later  # type: ignore[method-assign]
    worker.deliver(value)
    await asked.wait()
    worker.flow.on_lost([("jobs", 0)])
    may_open.set()
    await eventually(lambda: not worker.flow._tasks, "the attempt has ended")
    assert [name for name in worker.names() if name != "dead-letter"] == ["abandon"]
    assert worker.table.job("job") is None
    assert worker.completed == []


async def test_a_cancellation_while_the_result_is_in_flight_changes_nothing(worker: FakeWorker) -> None:
    request_id = await running(worker)
    worker.producer.may_send.clear()
    worker.flow.on_updates([tokens(request_id, 97, 98, 99, finish=FinishReason.LENGTH)])
    await eventually(lambda: "decide" in worker.names(), "it is decided")
    worker.flow.on_cancel("job")
    worker.producer.may_send.set()
    await eventually(lambda: bool(worker.completed), "the record is settled")
    assert dict(worker.log)["end"].status == "completed"


async def test_a_decision_of_an_earlier_attempt_is_repeated_without_computing(
    worker: FakeWorker,
) -> None:
    request_id = await running(worker)
    worker.flow.on_updates([tokens(request_id, 97, finish=FinishReason.STOP)])
    await eventually(lambda: bool(worker.completed), "the first attempt")
    record = dict(worker.log)["results"]
    worker.log.clear()
    worker.engine.specs.clear()
    opened = worker.publisher.opened("job", attempts=2, decided=record, resumed=(ResumedChoice((97,), "a"),))
    worker.publisher.outcomes = [opened]
    worker.deliver(job(), offset=1)
    await eventually(lambda: len(worker.completed) == 2, "the second attempt")
    assert worker.names() == ["start", "results", "end", "complete"]
    assert dict(worker.log)["results"] == record
    assert worker.engine.specs == {}


async def test_a_decided_result_that_is_none_of_ours_is_computed_again(worker: FakeWorker) -> None:
    worker.publisher.outcomes = [worker.publisher.opened("job", attempts=2, decided=b"junk")]
    request_id = await running(worker)
    worker.flow.on_updates([tokens(request_id, 97, finish=FinishReason.STOP)])
    await eventually(lambda: bool(worker.completed), "the record is settled")
    assert parse_result(dict(worker.log)["results"]).status == "completed"


@pytest.mark.parametrize(
    ("value", "status", "code"),
    [
        (b"{", "failed", "invalid_json"),
        (None, "failed", "no_value"),
        (job(typo=1), "rejected", "unknown_field"),
    ],
)
async def test_a_job_that_cannot_run_is_refused_with_a_dead_letter_and_a_result(
    worker: FakeWorker, value: bytes | None, status: str, code: str
) -> None:
    worker.deliver(value)
    await eventually(lambda: bool(worker.completed), "the record is settled")
    assert worker.names() == ["dead-letter", "start", "decide", "results", "end", "complete"]
    result = parse_result(dict(worker.log)["results"])
    assert (result.id, result.status, result.error and result.error.code) == ("job", status, code)
    assert dict(worker.log)["end"].refused


async def test_each_try_to_end_a_broken_job_is_smaller_and_the_last_one_is_a_bare_result(
    worker: FakeWorker,
) -> None:
    worker.publisher.outcomes = [RuntimeError("first"), RuntimeError("second"), RuntimeError("third")]
    worker.deliver(job())
    await eventually(lambda: bool(worker.completed), "the record is settled")
    result = parse_result(dict(worker.log)["results"])
    assert (result.id, result.status) == ("unparsed:jobs:0:0", "failed")


async def test_a_record_that_cannot_even_be_refused_ends_the_worker(worker: FakeWorker) -> None:
    running_flow = asyncio.create_task(worker.flow.run())
    worker.producer.failures = [RuntimeError("broken")] * 9
    worker.deliver(b"{")
    with pytest.raises(InternalError, match="cannot be ended"):
        await asyncio.wait_for(running_flow, 5)
    assert worker.completed == []


async def test_a_worker_that_closes_leaves_the_record_to_the_next_one(worker: FakeWorker) -> None:
    worker.producer.failures = [DependencyError("closing")]
    worker.deliver(b"{")
    await eventually(lambda: not worker.flow._tasks, "the attempt has ended")
    assert worker.completed == []


async def test_a_result_that_its_topic_refuses_is_replaced_by_one_that_says_so(worker: FakeWorker) -> None:
    request_id = await running(worker)
    worker.producer.failures = [JobError("record_too_large", "too large")]
    worker.flow.on_updates([tokens(request_id, 97, finish=FinishReason.STOP)])
    await eventually(lambda: bool(worker.completed), "the record is settled")
    assert worker.names() == ["start", "delta", "decide", "decide", "results", "end", "complete"]
    result = parse_result(dict(worker.log)["results"])
    assert (result.status, result.choices) == ("failed", ())


async def test_a_superseded_record_is_settled_though_another_record_has_its_id_here(
    worker: FakeWorker,
) -> None:
    """Redis forgot the job, and a producer's retry took its id: the first record is then a duplicate."""
    await running(worker)
    first = worker.publisher.streams[0]
    worker.deliver(job(), offset=1)
    await eventually(lambda: len(worker.publisher.streams) == 2, "the second record has the stream")
    worker.publisher.outcomes = [Opened(Outcome.DUPLICATE, 2, False, fate="completed")]
    first.fenced = True
    worker.flow.on_fenced("job", first.epoch)
    await eventually(
        lambda: 0 in [delivery.offset for delivery in worker.completed], "the first record is settled"
    )


async def test_a_refused_duplicate_that_is_fenced_is_not_settled_but_tried_again(worker: FakeWorker) -> None:
    """The attempt that fenced it may belong to a worker that has lost the record, and sends nothing."""
    duplicate = Opened(Outcome.DUPLICATE, 2, False, fate="completed", same_content=False)
    refusal = worker.publisher.opened("duplicate:jobs:0:0")
    fenced = worker.publisher.streams[0]
    fenced.fenced = True
    fenced.attempt = replace(fenced.attempt, origin=f"jobs/0/0@{int(worker.wall_s * 1000)}")
    worker.publisher.outcomes = [duplicate, refusal]
    worker.deliver(job())
    await eventually(lambda: "start" in worker.names() and not worker.flow._tasks, "the attempt has ended")
    assert worker.completed == []
    worker.publisher.outcomes = [duplicate]
    worker.flow.on_fenced("duplicate:jobs:0:0", fenced.epoch)
    await eventually(lambda: bool(worker.completed), "the record is settled")
    assert worker.names().count("results") == 1


async def test_a_refusal_that_gets_a_placeholder_leaves_its_first_id(worker: FakeWorker) -> None:
    run = JobRun.begin(worker.deliver(job()), now_s=0.0, wall_s=0.0)
    for job_id in ("job", "unparsed:jobs:0:0"):
        worker.table.name(run, job_id, worker.publisher.opened(job_id))
    assert worker.table.job("job") is not run
    assert worker.table.job("unparsed:jobs:0:0") is run
