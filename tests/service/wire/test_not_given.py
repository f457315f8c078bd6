"""What OpenAI's clients and servers write for "not given" is taken as that, by the code and by the schemas."""

import json
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator

from service.errors import JobError
from service.wire import Job, parse_job
from service.wire.openai_batch import BODY_FIELDS, CHAT_URL, COMPLETIONS_URL
from service.wire.openai_fields import EMPTY, REPLY_FIELDS, REQUEST_FIELDS
from service.wire.response_format import NamedSchema
from service.wire.schemas import documents

FILES = documents()
SCHEMAS = {
    name: Draft202012Validator(json.loads(FILES[f"{name}.schema.json"]))
    for name in ("job", "openai-batch-line")
}
USER = {"role": "user", "content": "Hello"}
BODIES = {CHAT_URL: {"messages": [USER]}, COMPLETIONS_URL: {"prompt": "Hello"}}
EMPTY_VALUES = [json.dumps(value) for value in EMPTY]


def accepted(document: dict[str, Any]) -> Job | None:
    """The job, or None when it is refused; the schema says the same."""
    name = "openai-batch-line" if "body" in document else "job"
    try:
        job = parse_job(orjson.dumps(document), key=None, timestamp_ms=0)
    except JobError:
        job = None
    assert SCHEMAS[name].is_valid(document) == (job is not None), document
    return job


def message(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant"} | fields, USER]


def texts(fields: dict[str, Any]) -> list[str] | None:
    job = accepted({"id": "a", "messages": message(**fields)})
    return None if job is None else [turn["content"] for turn in job.template_messages()]


def test_null_is_not_given_in_every_optional_field_of_a_job() -> None:
    optional = [name for name, field in Job.model_fields.items() if not field.is_required()]
    plain = accepted({"id": "a", "prompt": "x"})
    for name in [*optional, *REQUEST_FIELDS, "top_logprobs", "max_completion_tokens", "some_new_field"]:
        if name != "prompt":
            assert accepted({"id": "a", "prompt": "x", name: None}) == plain, name
    assert accepted({"id": None, "prompt": "x"}) is None


def test_null_is_not_given_in_the_parts_of_a_job_too() -> None:
    plain = accepted({"id": "a", "messages": [USER]})
    for fields in (
        {"slo": {"ttft_ms": None, "tpot_ms": None}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"messages": [USER | {"name": None, "tool_call_id": None, "cache_control": None}]},
    ):
        assert accepted({"id": "a", "messages": [USER]} | fields) == plain
    optional = {name: None for name, field in NamedSchema.model_fields.items() if not field.is_required()}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, **optional}, "regex": None}
    assert accepted({"id": "a", "messages": [USER], "response_format": schema})


@pytest.mark.parametrize("url", BODIES)
def test_null_is_not_given_in_every_field_of_a_batch_line(url: str) -> None:
    line = {"custom_id": "a", "url": url, "body": BODIES[url]}
    plain = accepted(line)
    for name in (BODY_FIELDS[url] | REQUEST_FIELDS) - BODIES[url].keys():
        assert accepted(line | {"body": BODIES[url] | {name: None}}) == plain, name
    for name in ("id", "method", "error"):
        assert accepted(line | {name: None}) == plain, name


@pytest.mark.parametrize("empty", EMPTY_VALUES)
def test_fields_that_are_not_served_may_be_empty_and_nothing_else(empty: str) -> None:
    for name in REQUEST_FIELDS:
        value = json.loads(empty)
        assert accepted({"id": "a", "prompt": "x", name: value}), name
        for url in BODIES:
            line = {"custom_id": "a", "url": url, "body": BODIES[url] | {name: value}}
            assert accepted(line), name
    for name in REQUEST_FIELDS:
        assert accepted({"id": "a", "prompt": "x", name: [{}]}) is None, name
        with pytest.raises(JobError, match=f"{name}: not supported; it may only be null or empty") as refused:
            parse_job(orjson.dumps({"id": "a", "prompt": "x", name: [1]}), key=None, timestamp_ms=0)
        assert (refused.value.code, refused.value.limit) == ("unknown_field", "null or empty")


def test_openai_reply_sent_back_as_a_message_is_accepted() -> None:
    reply = {"content": "Hi", "refusal": None, "annotations": [], "audio": None, "function_call": None}
    assert texts(reply | {"tool_calls": None}) == ["Hello", "Hi", "Hello"]
    assert texts(reply | {"tool_calls": [], "reasoning_content": None}) == ["Hello", "Hi", "Hello"]
    for name in REPLY_FIELDS:
        assert texts({"content": "Hi", name: [{"id": "call_1"}]}) is None, name


def test_an_openai_reply_without_content_becomes_its_refusal_or_empty_text() -> None:
    assert texts({"content": None, "refusal": "I cannot."}) == ["Hello", "I cannot.", "Hello"]
    assert texts({"content": [{"type": "refusal", "refusal": "I cannot."}]}) == [
        "Hello",
        "I cannot.",
        "Hello",
    ]
    for nothing in ({"content": None}, {"content": "", "refusal": ""}, {"tool_calls": None}):
        assert texts(nothing) == ["Hello", "", "Hello"]
    assert texts({"content": "Hi", "refusal": "I cannot."}) is None, "one of them would be lost"
    for role in ("user", "system", "tool", "developer"):
        assert accepted({"id": "a", "messages": [USER, {"role": role, "content": None}]}) is None
        assert accepted({"id": "a", "messages": [{"role": role, "content": "x", "refusal": "no"}]}) is None
