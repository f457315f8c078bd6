"""Every kind of bad job ends in one JobError that names field, value and limit."""

import json
from typing import Any

import orjson
import pytest

from service.errors import JobError
from service.wire import Job, limits, parse_job
from tests.service.wire.examples import GOOD, bad_fields


def parse(
    value: bytes | dict[str, Any] | None, key: bytes | None = b"key-1", timestamp_ms: int = 1000
) -> Job:
    data = orjson.dumps(value) if isinstance(value, dict) else value
    return parse_job(data, key=key, timestamp_ms=timestamp_ms)


def error_of(value: bytes | dict[str, Any] | None, key: bytes | None = b"key-1") -> JobError:
    with pytest.raises(JobError) as caught:
        parse(value, key)
    error = caught.value
    assert error.field, "names the field"
    assert error.value is not None, "names the value"
    assert error.limit is not None, "names the limit"
    assert error.message.startswith(f"{error.field}: ")
    assert len(error.message) <= limits.MAX_ERROR_MESSAGE_BYTES
    json.dumps([error.value, error.limit], allow_nan=False)
    return error


@pytest.mark.parametrize(("fields", "message"), list(bad_fields()))
def test_bad_field_is_named_with_value_and_limit(fields: dict[str, Any], message: str) -> None:
    error = error_of({**GOOD, **fields})
    assert error.message == message
    assert error.job_id == "job-1"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: empty; at least 1 entry"),
        (
            [{"role": "robot", "content": "x"}],
            "messages[0].role: 'robot' is not one of 'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        ([{"role": "user"}], "messages[0].content: missing; it is required"),
        (
            [{"role": "user", "content": 5}],
            "messages[0].content: int is neither a string nor a list of text parts",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content: part of type 'image_url' is not supported; only text is",
        ),
        ([{"role": "user", "content": "x"}] * 1025, "messages: 1025 entries is above the limit 1024"),
        (["hello"], "messages[0]: a string of 5 characters is not an object"),
    ],
)  # fmt: skip
def test_bad_messages(messages: list[Any], message: str) -> None:
    assert error_of({"id": "job-1", "messages": messages}).message == message


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "prompt_token_ids: empty; at least 1 entry"),
        ([1, -1], "prompt_token_ids[1]: -1 is below the limit 0"),
        ([2**31], f"prompt_token_ids[0]: {2**31} is above the limit {2**31 - 1}"),
        (["a"] * 100_000, "prompt_token_ids[0]: 'a' is not an integer"),
        ([1] * 262_145, "prompt_token_ids: 262145 entries is above the limit 262144"),
    ],
)
def test_bad_prompt_token_ids(ids: list[Any], message: str) -> None:
    assert error_of({"id": "job-1", "prompt_token_ids": ids}).message == message


@pytest.mark.parametrize("bad_id", ["", "a b", "ä", "x" * 129, "a\n", "a/b", 5, None])
def test_id_outside_its_alphabet_falls_back_to_the_key(bad_id: Any) -> None:
    error = error_of({**GOOD, "id": bad_id})
    assert error.field == "id"
    assert error.job_id == "key-1"


def test_missing_id_and_no_usable_key() -> None:
    error = error_of({"prompt": "x"}, key=b"\xff key")
    assert (error.code, error.field, error.job_id) == ("missing_field", "id", None)


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        (None, "no_value", "value: null (a tombstone) is not a job"),
        (b"", "invalid_json", "value: broken JSON at line 1 column 1: "),
        (b'{"id":"a",\n"prompt":}', "invalid_json", "value: broken JSON at line 2 column 10: "),
        (b'{"id":"a","prompt":"\xff"}', "invalid_utf8", "value: byte 0xff at offset 20 is not valid UTF-8"),
        (b"[1]", "not_an_object", "value: a list of 1 entries is not a JSON object"),
        (b'"a"', "not_an_object", "value: a string of 1 characters is not a JSON object"),
        (b"[" * 200_000, "invalid_json", "value: broken JSON at "),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "missing_field", "id: missing; it is required"),
        (b'{"id":"a","prompt":"\\ud800"}', "invalid_json", "value: broken JSON at "),
        (b" " * 10_000_000, "record_too_large", "value: 10000000 bytes is above the limit 1048576"),
    ],
    ids=["null", "empty", "broken", "utf8", "list", "string", "nesting", "deep", "surrogate", "10MB"],
)  # fmt: skip
def test_unreadable_value_is_filed_under_the_key(value: bytes | None, code: str, message: str) -> None:
    error = error_of(value)
    assert error.code == code
    assert error.message.startswith(message)
    assert error.job_id == "key-1"


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("NaN", "temperature: NaN is not a finite number"),
        ("Infinity", "temperature: Infinity is not a finite number"),
        ("-Infinity", "temperature: -Infinity is not a finite number"),
        ("1e999", "temperature: Infinity is not a finite number"),
        ("1e300", "temperature: 1e+300 is above the limit 2"),
        ("9" * 40, "temperature: 1e+40 is above the limit 2"),
    ],
)
def test_numbers_that_are_none(number: str, message: str) -> None:
    error = error_of(f'{{"id":"job-1","prompt":"NaN","temperature":{number}}}'.encode())
    assert error.message == message
    assert error.job_id == "job-1"


@pytest.mark.parametrize("field", ["stop", "deadline", "max_tokens", "seed", "temperature"])
@pytest.mark.parametrize("number", ["-18446744073709551615", "9" * 4000, "-" + "9" * 5000])
def test_huge_integers_are_reported_even_if_there_is_a_nan(field: str, number: str) -> None:
    error = error_of(f'{{"id":"job-1","prompt":"x","{field}":{number},"top_p":NaN}}'.encode())
    orjson.dumps([error.message, error.value, error.limit])


@pytest.mark.parametrize("nested", [False, True])
def test_many_unknown_fields_are_counted_and_not_listed(nested: bool) -> None:
    unknown: dict[str, Any] = {f"f{number}": 0 for number in range(60_000)}
    error = error_of({"id": "a", "messages": [unknown]} if nested else {**GOOD, **unknown})
    assert error.message.endswith(" fields is above the limit 64")


def test_a_huge_integer_is_refused_as_too_large() -> None:
    error = error_of(b'{"id":"job-1","prompt":"x","max_tokens":' + b"9" * 40 + b"}")
    assert error.message == "max_tokens: 1e+40 is not a 64-bit integer"


@pytest.mark.parametrize("place", ["metadata", "schema"])
def test_nesting_bomb_in_a_free_form_part(place: str) -> None:
    bomb = b'{"a":' * 500 + b"1" + b"}" * 500
    if place == "schema":
        bomb = b'{"type":"json_schema","json_schema":{"name":"n","schema":' + bomb + b"}}"
    field = b"metadata" if place == "metadata" else b"response_format"
    error = error_of(b'{"id":"job-1","prompt":"x","' + field + b'":' + bomb + b"}")
    assert error.message.endswith("nesting is deeper than the limit 32")


@pytest.mark.parametrize(
    "text",
    [
        '{"id":"a","prompt":"x","prompt":"y"}',
        '{"id":"a","prompt":"x","slo":{"ttft_ms":1,"ttft_ms":2}}',
        '{"id":"a","messages":[{"role":"user","role":"system","content":"x"}]}',
        '{"id":"a","prompt":"x","metadata":{"a":[{"b":1,"b":2}]}}',
        '{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x","seed":1,"seed":2}}',
        r'{"id":"a","prompt":"x","prom\u0070t":"y"}',
        r'{"id":"a","prompt":"x","metadata":{"a\/b":1,"a/b":2}}',
        r'{"id":"a","prompt":"x","metadata":{"a\\":1,"a\\" :2}}',
        r'{"id":"a","prompt":": \"x\": ","metadata":{"\"":1,"\"":2}}',
    ],
)
def test_duplicate_key_is_refused_instead_of_the_last_one_winning(text: str) -> None:
    assert error_of(text.encode()).code == "duplicate_key"


def test_key_that_is_also_a_word_of_the_text_is_no_duplicate() -> None:
    job = parse(
        {"id": "a", "prompt": 'the words "id" and "prompt" and "prompt"', "metadata": {"id": "prompt"}}
    )
    assert job.id == "a"


@pytest.mark.parametrize("text", ['"a": 1, "a": 2', ': "', '\\": \\\\": "', "\\"])
def test_text_that_looks_like_keys_is_no_duplicate(text: str) -> None:
    assert parse({"id": "a", "prompt": text, "metadata": {text: 1}}).prompt == text


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ('"metadata":{"a":[1,{"b":NaN}]}', "metadata.a[1].b: NaN is not a finite number"),
        (f'"metadata":{{"a":-{"9" * 5000}}}', "metadata.a: -Infinity is not a finite number"),
        (f'"max_tokens":{"9" * 5000}', "max_tokens: Infinity is not an integer"),
        (
            '"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"minimum":NaN}}}',
            "response_format.json_schema.schema.minimum: NaN is not a finite number",
        ),
    ],
    ids=["nan", "digits", "field", "schema"],
)
def test_number_that_json_cannot_write_is_named_by_its_field(field: str, message: str) -> None:
    error = error_of(f'{{"id":"job-1","prompt":"x",{field}}}'.encode())
    assert (error.code, error.message, error.job_id) == ("invalid_value", message, "job-1")


def test_penalty_too_small_to_divide_by_is_refused() -> None:
    error = error_of({**GOOD, "repetition_penalty": 1e-300})
    assert error.message == "repetition_penalty: 1e-300 is below the limit 0.01"
    assert parse({**GOOD, "repetition_penalty": 0.01}).repetition_penalty == 0.01


def test_errors_never_contain_the_users_text() -> None:
    secret = "my diary"
    for fields in ({"promt": secret}, {"messages": [{"role": "user", "content": "x", "txt": secret}]}):
        error = error_of({"id": "a", **fields})
        assert secret not in f"{error.message} {error.value} {error.limit}"


def test_seconds_until_the_deadline_need_a_timestamp() -> None:
    with pytest.raises(JobError, match="deadline: seconds count from the record's timestamp"):
        parse({**GOOD, "deadline": 5}, timestamp_ms=-1)
    assert parse(GOOD, timestamp_ms=-1).deadline is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"id":"a","prompt":"x","":1}', '""'),
        ('{"id":"a","prompt":"x","[key]":1}', "[key]"),
        ('{"id":"a","prompt":"x","slo":{"":1}}', 'slo.""'),
        ('{"id":"a","prompt":"x","metadata":{"":1,"":2}}', '""'),
        (r'{"id":"a","prompt":"x","\ud800":NaN}', "value"),
        (r'{"custom_id":"a","url":"/v1/completions","\ud800":NaN}', "?"),
        (r'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x","\ud800":NaN}}', "body.?"),
        ('{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x","":1}}', 'body.""'),
    ],
)
def test_a_name_that_is_empty_or_half_a_surrogate_pair_can_be_written(text: str, field: str) -> None:
    error = error_of(text.encode())
    assert error.field == field
    orjson.dumps([error.message, error.field, error.value, error.limit])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            '"messages":[{"role":"user","content":[{"type":%s}]}]',
            "messages[0].content: part of type 'list' is",
        ),
        ('"prompt":"x","response_format":{"type":%s}', "response_format.type: 'list' is not one of"),
    ],
)
def test_a_type_of_a_thousand_levels_is_not_written_out(fields: str, message: str) -> None:
    error = error_of(b'{"id":"a",' + fields.encode() % (b"[" * 1000 + b"]" * 1000) + b"}")
    assert error.message.startswith(message)


def test_a_duplicate_is_refused_although_the_value_that_is_lost_is_too_deep_to_be_read() -> None:
    deep = b'{"a":' * 1000 + b"1" + b"}" * 1000
    error = error_of(b'{"id":"a","prompt":' + deep + b',"prompt":"x"}')
    assert (error.code, error.field) == ("duplicate_key", "value")
