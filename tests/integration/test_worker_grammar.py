"""response_format from Kafka to the result: good grammars are followed, bad ones end one job, and the worker
continues."""

import re
from typing import Any

import jsonschema
import orjson
import pytest

from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer
from tests.support.service import new_service, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.redis]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["s", "m", "l"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
ENDLESS = {"type": "integer", "multipleOf": 99_999_989}


def schema(document: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": document}}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "regex": pattern}


GOOD: dict[str, dict[str, Any]] = {
    "object": {"type": "json_object"},
    "schema": schema(SCHEMA),
    "regex": regex(r"\d{3}-[a-z]{2,5}"),
    "choice": {"type": "choice", "choice": ["yes", "no", "it depends"]},
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "bad-regex": (regex("(["), "response_format.regex"),
    "bad-schema": (schema({"type": "nonsense"}), "response_format.json_schema.schema"),
    "endless": (schema(ENDLESS), "response_format.json_schema.schema"),
}


async def test_bad_regex_or_grammar_ends_one_job_and_good_ones_are_followed(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    formats = {"plain-before": {"type": "text"}} | {name: form for name, (form, _) in BAD.items()} | GOOD
    jobs = [
        {"id": name, "prompt": f"prompt of {name}", "max_tokens": 64, "n": 2, "response_format": form}
        for name, form in (formats | {"plain-after": {"type": "text"}}).items()
    ]
    async with running_worker(service.settings()):
        await service.publish(jobs)
        results = await service.wait_for_results([job["id"] for job in jobs])
        streams = {name: await service.read(name) for name in [*BAD, *GOOD]}

    for name, (_, field) in BAD.items():
        error = results[name].error
        assert error is not None
        assert (results[name].status, error.code, error.field) == ("rejected", "invalid_grammar", field)
        assert error.limit is not None
    assert {results[name].status for name in [*GOOD, "plain-before", "plain-after"]} == {"completed"}
    texts = {name: [choice.text for choice in results[name].choices] for name in GOOD}
    for name in GOOD:
        assert [choice.finish_reason for choice in results[name].choices] == ["stop"] * 2, texts[name]
        assert streams[name].text == texts[name][0]
    assert all(isinstance(orjson.loads(text), dict) for text in texts["object"])
    for text in texts["schema"]:
        jsonschema.validate(orjson.loads(text), SCHEMA)
    assert all(re.fullmatch(r"\d{3}-[a-z]{2,5}", text) for text in texts["regex"])
    assert set(texts["choice"]) <= {"yes", "no", "it depends"}
    assert all(stream.verdict.complete for stream in streams.values())
