"""Good jobs: what their fields come to mean."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import JobError
from service.wire import Job, parse_job

STAMP_MS = 1_900_000_000_000
"""Timestamp of every record here."""


def job(**fields: Any) -> Job:
    given_prompt = fields.keys() & {"messages", "prompt", "prompt_token_ids"}
    document = {"id": "job-1", **({} if given_prompt else {"prompt": "hi"}), **fields}
    return parse_job(orjson.dumps(document), key=None, timestamp_ms=STAMP_MS)


def test_defaults() -> None:
    plain = job()
    assert (plain.temperature, plain.top_p, plain.top_k, plain.n) == (1.0, 1.0, 0, 1)
    assert (plain.service_class, plain.stream, plain.return_token_ids) == ("standard", True, False)
    assert plain.response_format.type == "text"
    assert plain.max_tokens is None
    assert plain.stop_strings == ()


def test_parts_of_content_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = job(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert asked.template_messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
    ]


def test_different_stops_are_distinguished() -> None:
    assert job(stop="END").stop_strings == ("END",)
    both = job(stop=["a", 7, "b", 9])
    assert both.stop_strings == ("a", "b")
    assert both.stop_token_ids == {7, 9}


def test_logit_bias_is_sorted_by_token_id() -> None:
    assert job(logit_bias={"10": -100, "9": 0.5}).logit_bias_items == ((9, 0.5), (10, -100.0))


@pytest.mark.parametrize(
    ("deadline", "at_ms"),
    [
        (None, None),
        (2.5, STAMP_MS + 2_500),
        (1, STAMP_MS + 1_000),
        ("1970-01-01T00:00:09Z", 9_000),
        ("1970-01-01t01:00:09.250+01:00", 9_250),
    ],
)
def test_deadline_counts_from_the_records_timestamp(deadline: Any, at_ms: int | None) -> None:
    assert job(deadline=deadline).deadline_at_ms(STAMP_MS) == at_ms


@pytest.mark.parametrize(
    "no_time", [-1, 0, STAMP_MS // 1_000, STAMP_MS * 1_000, 999_999_999_999, 4_102_444_800_000]
)
def test_hazard_a_stamp_in_another_unit_would_expire_the_job_at_once_or_never(no_time: int) -> None:
    document = {"id": "job-1", "prompt": "hi", "deadline": 30}
    with pytest.raises(JobError, match=rf"deadline: .* {no_time} ms is not one; give a time"):
        parse_job(orjson.dumps(document), key=None, timestamp_ms=no_time)
    absolute = orjson.dumps({**document, "deadline": "2030-01-31T12:00:00Z"})
    assert parse_job(absolute, key=None, timestamp_ms=no_time).deadline is not None


@pytest.mark.parametrize("stamp_ms", [1_000_000_000_000, 4_102_444_799_999])
def test_seconds_count_from_any_stamp_of_this_century(stamp_ms: int) -> None:
    document = orjson.dumps({"id": "job-1", "prompt": "hi", "deadline": 30})
    timed = parse_job(document, key=None, timestamp_ms=stamp_ms)
    assert timed.deadline_at_ms(stamp_ms) == stamp_ms + 30_000


def test_seeds_are_fixed_by_the_job_so_that_a_redelivery_samples_the_same() -> None:
    assert job().seed_of_choice(0) == job().seed_of_choice(0)
    assert job(seed=42).seed_of_choice(0) == 42
    assert job(seed=-1).seed_of_choice(0) == 2**64 - 1
    seeds = {job(seed=42, n=16).seed_of_choice(index) for index in range(16)}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_top_k_minus_one_means_the_whole_vocabulary() -> None:
    assert job(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}},
        {"type": "regex", "regex": "[a-z]+"},
        {"type": "choice", "choice": ["yes", "no"]},
    ],
)
def test_response_formats(response_format: dict[str, Any]) -> None:
    assert job(response_format=response_format).response_format.type == response_format["type"]


def test_ids_use_the_whole_alphabet_and_length() -> None:
    longest = "Az09._:-" * 16
    assert job(id=longest).id == longest


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
known_fields = st.sampled_from([*sorted(Job.model_fields), "custom_id", "method", "url", "body"])


@given(st.dictionaries(known_fields, json_values, max_size=8))
def test_any_json_in_known_fields_gives_a_job_or_a_job_error(document: dict[str, Any]) -> None:
    _parse_or_refuse(orjson.dumps({"id": "a", "prompt": "x", **document}))


@given(
    st.dictionaries(
        st.sampled_from([*sorted(Job.model_fields), "top_logprobs", "user"]), json_values, max_size=6
    )
)
def test_any_json_in_a_batch_body_gives_a_job_or_a_job_error(body: dict[str, Any]) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    _parse_or_refuse(orjson.dumps(line))


@given(json_values)
def test_any_json_gives_a_job_or_a_job_error(document: Any) -> None:
    _parse_or_refuse(orjson.dumps(document))


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_any_bytes_give_a_job_or_a_job_error(value: bytes, key: bytes) -> None:
    _parse_or_refuse(value, key)
    _parse_or_refuse(b'{"id":"a","prompt":"' + value + b'"}', key)
    _parse_or_refuse(b'{"id":"a","temperature":' + value + b"}", key)


def _parse_or_refuse(value: bytes, key: bytes | None = b"k") -> None:
    refused = None
    try:
        parsed = parse_job(value, key=key, timestamp_ms=STAMP_MS)
    except JobError as error:
        refused = error
    if refused is None:
        orjson.dumps(parsed.metadata)
        return
    assert None not in (refused.field, refused.value, refused.limit)
    orjson.dumps([refused.code, refused.message, refused.field, refused.value, refused.limit, refused.job_id])
