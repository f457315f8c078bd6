"""The fake client and the real one behave the same towards a program that uses them."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import aclosing

import orjson
import pytest

from service.cli.serve import local_service
from service.client import Client, JobClient, Seen
from service.client.testing import FakeClient
from service.errors import JobError
from service.settings import load_settings
from service.stream.reader import Item, Verdict
from service.wire import Delta, End, Job, Start

LIMIT_S = 30
LONG = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
"""A job that cannot end before the test cancels it."""
SHORT = {"prompt": "trees", "max_tokens": 6, "seed": 1, "ignore_eos": True}


@pytest.fixture(params=["fake", "real"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[JobClient]:
    if request.param == "fake":
        async with FakeClient(hold=lambda job: job.max_tokens == LONG["max_tokens"]) as fake:
            yield fake
        return
    settings = load_settings(
        {
            "TAILRACE_ENGINE": "deterministic",
            "TAILRACE_DETERMINISTIC_STEP_MS": "2",
            "TAILRACE_ADMIN_PORT": "0",
        }
    )
    async with local_service(settings) as (local, _), Client(local) as real:
        yield real


@pytest.fixture(autouse=True)
async def _bounded() -> AsyncIterator[None]:
    async with asyncio.timeout(LIMIT_S):
        yield


async def _items(client: JobClient, job_id: str) -> list[Item]:
    async with aclosing(client.stream(job_id, idle_timeout_s=LIMIT_S)) as stream:
        return [item async for item in stream]


async def _begun(client: JobClient, job_id: str) -> None:
    async with aclosing(client.stream(job_id, idle_timeout_s=LIMIT_S)) as stream:
        assert isinstance(await anext(stream), Start)


async def test_a_job_runs_and_its_stream_equals_its_result(client: JobClient) -> None:
    seen: list[Item] = []
    finished = await client.run({"id": "one", "metadata": {"row": 7}} | SHORT, on_item=seen.append)
    result = finished.result
    assert (result.id, result.status, result.error, result.metadata) == ("one", "completed", None, {"row": 7})
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 6)
    assert [choice.finish_reason for choice in result.choices] == ["length"]
    assert finished.texts == (result.choices[0].text,)
    assert finished.stream_verified
    assert isinstance(seen[0], Start)
    assert isinstance(seen[-1], Verdict)


async def test_the_same_prompt_gives_the_same_text_and_another_prompt_another(client: JobClient) -> None:
    first = await client.run({"id": "one"} | SHORT)
    again = await client.run({"id": "two"} | SHORT, verify_stream=False)
    other = await client.run({"id": "three"} | SHORT | {"prompt": "stone"})
    assert first.result.choices[0].text == again.result.choices[0].text != other.result.choices[0].text
    assert (again.texts, again.stream_verified) == ((), False)


async def test_every_choice_has_its_text(client: JobClient) -> None:
    finished = await client.run({"id": "two", "n": 2} | SHORT)
    assert [choice.index for choice in finished.result.choices] == [0, 1]
    assert len(finished.texts) == 2
    assert finished.stream_verified


async def test_a_late_reader_sees_every_event_from_the_first_one(client: JobClient) -> None:
    await client.run({"id": "one"} | SHORT)
    *events, verdict = await _items(client, "one")
    assert [event.seq for event in events if isinstance(event, Start | Delta | End)] == list(
        range(len(events))
    )
    assert isinstance(events[0], Start)
    assert isinstance(events[-1], End)
    assert isinstance(verdict, Verdict)
    assert (verdict.status, verdict.complete) == ("completed", True)


@pytest.mark.parametrize(
    ("job", "field"),
    [
        ({"id": "bad", "prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"id": "bad", "prompt": "x", "unknown": 1}, "unknown"),
        ({"id": "bad"}, "prompt"),
    ],
)
async def test_a_job_that_cannot_run_is_rejected_and_frees_its_id(
    client: JobClient, job: dict[str, object], field: str
) -> None:
    finished = await client.run(job)
    error = finished.result.error
    assert (finished.result.status, error and error.field) == ("rejected", field)
    kinds = [type(item) for item in await _items(client, "bad")]
    assert kinds == [Start, End, Verdict]
    assert await client.seen("bad", orjson.dumps(job)) is Seen.NEVER


async def test_a_record_that_is_not_json_fails(client: JobClient) -> None:
    awaited = client.expect("odd")
    await client.publish("odd", b"{")
    result = await client.result_of("odd", awaited)
    assert (result.status, result.error and result.error.code) == ("failed", "invalid_json")


async def test_a_running_job_is_cancelled(client: JobClient) -> None:
    awaited = client.expect("long")
    await client.publish("long", orjson.dumps({"id": "long"} | LONG))
    await _begun(client, "long")
    await client.cancel("long")
    result = await client.result_of("long", awaited)
    assert result.status == "cancelled"
    assert [choice.finish_reason for choice in result.choices] == ["cancelled"]
    verdict = (await _items(client, "long"))[-1]
    assert isinstance(verdict, Verdict)
    assert (verdict.status, verdict.complete) == ("cancelled", True)


async def test_a_job_that_is_cancelled_before_it_is_published_never_runs(client: JobClient) -> None:
    await client.cancel("early")
    finished = await client.run({"id": "early"} | SHORT)
    assert (finished.result.status, finished.result.usage.completion_tokens) == ("cancelled", 0)


async def test_cancelling_the_call_cancels_the_job(client: JobClient) -> None:
    awaited = client.expect("long")
    call = asyncio.create_task(client.run({"id": "long"} | LONG))
    await _begun(client, "long")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await client.result_of("long", awaited)).status == "cancelled"


async def test_a_job_that_has_ended_is_not_cancelled_and_not_run_again(client: JobClient) -> None:
    job = {"id": "one"} | SHORT
    finished = await client.run(job)
    await client.cancel("one")
    await client.publish("one", orjson.dumps(job))
    assert await client.seen("one", orjson.dumps(job)) is Seen.ENDED
    assert await client.seen("one", b"{}") is Seen.OTHER_JOB
    assert await client.result_of("one") == finished.result


async def test_an_id_that_no_job_has_is_waited_for_until_the_limit(client: JobClient) -> None:
    assert await client.seen("none", b"{}") is Seen.NEVER
    with pytest.raises(TimeoutError, match="'none': no event within"):
        async with aclosing(client.stream("none", idle_timeout_s=0.05)) as stream:
            await anext(stream)


async def test_a_running_job_is_seen_as_running(client: JobClient) -> None:
    value = orjson.dumps({"id": "long"} | LONG)
    awaited = client.expect("long")
    await client.publish("long", value)
    await _begun(client, "long")
    assert await client.seen("long", value) is Seen.RUNNING
    await client.cancel("long")
    await client.result_of("long", awaited)


@pytest.mark.parametrize("name", [name for name in vars(JobClient) if not name.startswith("_")])
def test_every_method_has_one_signature_and_the_client_documents_it(name: str) -> None:
    real, fake, protocol = (getattr(kind, name) for kind in (Client, FakeClient, JobClient))
    assert inspect.signature(real) == inspect.signature(protocol) == inspect.signature(fake)
    documented = inspect.getdoc(real) or ""
    assert [each for each in inspect.signature(real).parameters if each not in ("self", "job_id")
            and each not in documented] == []  # fmt: skip


class TestFake:
    """What only the fake offers."""

    async def test_answers_are_given_by_the_test(self) -> None:
        async with FakeClient(lambda job: f"about {job.prompt}") as client:
            finished = await client.run({"id": "one", "prompt": "trees"})
            assert finished.texts == ("about trees",)
            assert finished.result.choices[0].finish_reason == "stop"
            assert [each.job_id for each in client.published] == ["one"]

    async def test_an_answer_may_be_an_error(self) -> None:
        def refuse(job: Job) -> str:
            raise JobError("engine_error", "the model's step failed")

        async with FakeClient(refuse) as client:
            finished = await client.run({"id": "one", "prompt": "trees"})
        assert (finished.result.status, finished.result.choices) == ("failed", ())
        assert finished.result.error is not None
        assert finished.result.error.code == "engine_error"

    async def test_a_held_job_ends_when_it_is_released(self) -> None:
        async with FakeClient(hold=lambda _: True) as client:
            call = asyncio.create_task(client.run({"id": "one"} | SHORT))
            await _begun(client, "one")
            client.release("one")
            assert (await call).stream_verified
