"""The files under ops/schemas are what the code generates, and agree with what it accepts."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
import yaml

from service.errors import JobError
from service.wire import (
    Choice,
    DeadLetter,
    Delta,
    End,
    ErrorInfo,
    Event,
    Origin,
    Result,
    Start,
    TokenLogprob,
    Usage,
    encode_event,
    parse_job,
    text_sha256,
)
from service.wire.schemas import documents
from tests.service.wire.examples import GOOD, bad_fields

FOLDER = Path(__file__).parents[3] / "ops" / "schemas"
FILES = documents()


def validator(name: str) -> Any:
    schema = json.loads(FILES[f"{name}.schema.json"])
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", sorted(FILES))
def test_shipped_file_is_generated_from_the_code(name: str) -> None:
    shipped = (FOLDER / name).read_text("utf-8")
    assert shipped == FILES[name], "run python -m service.wire.schemas"


def test_nothing_else_is_shipped() -> None:
    assert {file.name for file in FOLDER.iterdir()} == FILES.keys()


FULL_JOB = {
    "id": "a", "model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": -5,
    "stop": ["x", 5], "ignore_eos": True, "presence_penalty": 1, "frequency_penalty": -1,
    "repetition_penalty": 1.5, "logit_bias": {"5": 3}, "logprobs": 0, "n": 2,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "service_class": "batch", "slo": {"ttft_ms": 5, "tpot_ms": None}, "deadline": 5, "tenant": "t",
    "stream": False, "return_token_ids": True, "metadata": {"k": "v"},
}  # fmt: skip


@pytest.mark.parametrize(
    "job", [GOOD, FULL_JOB, {"id": "b", "prompt_token_ids": [1, 2], "deadline": "2030-01-31T12:00:00Z"}]
)
def test_schema_and_code_accept_the_same_job(job: dict[str, Any]) -> None:
    validator("job").validate(job)
    parse_job(orjson.dumps(job), key=None, timestamp_ms=1_900_000_000_000)


# What a schema cannot say, or what only the code compares.
ONLY_IN_CODE = ("min_tokens: 9", "metadata: 4098", "logit_bias.3000000000")


@pytest.mark.parametrize(("fields", "message"), list(bad_fields()))
def test_schema_refuses_what_the_code_refuses(fields: dict[str, Any], message: str) -> None:
    accepted = validator("job").is_valid({**GOOD, **fields})
    assert accepted == message.startswith(ONLY_IN_CODE)


LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
HELLO = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("line", "good"),
    [
        (
            {**LINE, "body": {"model": "m", "messages": HELLO, "seed": None, "logprobs": True, "user": "u"}},
            True,
        ),
        ({**LINE, "body": {"messages": HELLO, "tools": [{}]}}, False),
        ({**LINE, "body": {"messages": HELLO, "temperature": 9}}, False),
        ({**LINE, "url": "/v1/completions", "body": {"prompt": ["x"], "logprobs": 3}}, True),
        ({**LINE, "url": "/v1/completions", "body": {"prompt": ["x", "y"]}}, False),
        ({**LINE, "url": "/v1/embeddings", "body": {"input": "x"}}, False),
    ],
)
def test_batch_line_schema_agrees_with_the_code(line: dict[str, Any], good: bool) -> None:
    assert validator("openai-batch-line").is_valid(line) == good
    try:
        parse_job(orjson.dumps(line), key=None, timestamp_ms=0)
        accepted = True
    except JobError:
        accepted = False
    assert accepted == good


def test_events_and_results_match_their_schemas() -> None:
    events: list[Event] = [
        Start("j", 0, (0, 3)),
        Delta("j", 0, 1, 0, "x", (5,), (TokenLogprob("x", 5, -1.0),)),
        Delta("j", 0, 2, 1, "", (5,)),
        End("j", 0, 3, "failed", "error", Usage(), 4, (text_sha256([]),), ErrorInfo("c", "m", "f", 1.5, 2)),
    ]
    for event in events:
        validator("event").validate(orjson.loads(encode_event(event)))
    result = Result("j", "completed", 1, "w", (Choice(0, "x", "stop", (5,)),), metadata={"k": 1})
    validator("result").validate(orjson.loads(result.encode()))
    assert not validator("result").is_valid({"id": "j"})


def test_dead_letter_headers_match_their_schema() -> None:
    letter = DeadLetter(None, b"", (("x", b"y"),), Origin("t", 0, 1, -1, 1, "code", "message"))
    validator("dead-letter").validate({name: value.decode() for name, value in letter.record_headers()})


def test_asyncapi_document_refers_only_to_existing_parts() -> None:
    document = yaml.safe_load(FILES["asyncapi.yaml"])
    assert document["asyncapi"] == "3.0.0"
    references = list(_references(document))
    assert references
    for reference in references:
        if reference.startswith("./"):
            assert reference.removeprefix("./") in FILES
            continue
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def _references(part: Any) -> Any:
    if isinstance(part, dict):
        yield from ([part["$ref"]] if "$ref" in part else [])
        part = list(part.values())
    if isinstance(part, list):
        for entry in part:
            yield from _references(entry)
