"""Events, results and dead letters survive encoding and decoding."""

import hashlib
import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InternalError, JobError
from service.wire import (
    Choice,
    DeadLetter,
    Delta,
    End,
    ErrorInfo,
    Origin,
    Result,
    SloOutcome,
    Start,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
    encode_event,
    finite_logprob,
    limits,
    parse_dead_letter,
    parse_event,
    parse_result,
    text_sha256,
)

LOGPROBS = (TokenLogprob(" a", 3, -0.25, (TopLogprob(" a", 3, -0.25), TopLogprob(" b", 4, -1.5))),)
END = End(
    "j", 2, 5, "failed", "error", Usage(3, 4, 1), 6, (text_sha256(["a"]),), ErrorInfo("nan", "logits: NaN")
)


@pytest.mark.parametrize(
    "event",
    [
        Start("j", 0, (0,)),
        Start("j", 3, (7, 0), attempt=2, worker="w-1"),
        Delta("j", 1, 4, 0, "", (1, 2)),
        Delta("j", 1, 4, 1, "世界", (1,), LOGPROBS),
        END,
        End("j", 1, 1, "completed", "stop", Usage(), 2, (text_sha256([]),)),
        End("j", 0, 1, "rejected", None, Usage(), 2, ()),
    ],
)
def test_event_survives(event: Start | Delta | End) -> None:
    assert parse_event(encode_event(event)) == event


def test_event_names_what_readers_rely_on() -> None:
    delta = orjson.loads(encode_event(Delta("j", 1, 4, 0, "x", (9,))))
    assert delta == {
        "v": 1, "id": "j", "epoch": 1, "seq": 4, "kind": "delta", "index": 0, "text": "x", "token_ids": [9]
    }  # fmt: skip
    end = orjson.loads(encode_event(END))
    assert end["error"] == {
        "code": "nan",
        "message": "logits: NaN",
        "field": None,
        "value": None,
        "limit": None,
    }
    assert end["text_sha256"] == [hashlib.sha256(b"a").hexdigest()]
    assert "error" not in orjson.loads(encode_event(End("j", 0, 1, "cancelled", None, Usage(), 2, ())))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"kind":"delta"}',
        b'{"v":2,"id":"j","epoch":0,"seq":0,"kind":"start","resumed_tokens":[0]}',
        b'{"v":1,"id":"j","epoch":0,"seq":1,"kind":"start","resumed_tokens":[0]}',
        b'{"v":1,"id":"j","epoch":0,"seq":0,"kind":"start","resumed_tokens":[0],"more":1}',
        b'{"v":1,"id":"j","epoch":"0","seq":0,"kind":"start","resumed_tokens":[0]}',
    ],
)
def test_a_value_that_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(InternalError, match="event"):
        parse_event(data)


def test_result_survives() -> None:
    result = Result(
        "j", "completed", 2, "w", (Choice(0, "a", "stop", (1, 2), LOGPROBS), Choice(1, "b", "length")),
        Usage(5, 3, 4), Timings(0.1, 0.2, 0.01, 1.5), SloOutcome(True, None), None, {"k": [1, {"x": None}]},
    )  # fmt: skip
    data = result.encode()
    assert parse_result(data) == result
    written = orjson.loads(data)
    assert "error" not in written
    assert "token_ids" not in written["choices"][1]


def test_result_of_a_refused_job_carries_field_value_and_limit() -> None:
    error = JobError("invalid_value", "n: 17 is above the limit 16", field="n", value=17, limit=16)
    written = orjson.loads(Result("j", "rejected", 1, "w", error=ErrorInfo.of(error)).encode())
    assert written["choices"] == []
    assert written["error"] == {
        "code": "invalid_value", "message": "n: 17 is above the limit 16", "field": "n", "value": 17, "limit": 16
    }  # fmt: skip


def test_result_that_is_none_is_refused() -> None:
    with pytest.raises(InternalError, match="result"):
        parse_result(b'{"id":"j"}')


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e30])
def test_logprobs_without_a_json_number_become_the_floor(logprob: float) -> None:
    assert finite_logprob(logprob) == -9999.0
    assert finite_logprob(-0.5) == -0.5


headers = st.lists(
    st.tuples(st.sampled_from(["traceparent", "tailrace-dl-topic", "tailrace-dl-message", "x"]), st.binary()),
    max_size=9,
)


@given(st.none() | st.binary(), st.none() | st.binary(), headers, st.text())
def test_dead_letter_gives_the_original_back_whatever_its_headers(
    key: bytes | None, value: bytes | None, own: list[tuple[str, bytes]], message: str
) -> None:
    origin = Origin("tailrace.jobs", 3, 12345, 1700000000000, 2, "invalid_json", message)
    letter = DeadLetter(key, value, tuple(own), origin)
    read = parse_dead_letter(key, value, letter.record_headers())
    assert read.replay() == (key, value, own)
    assert read.origin.offset == 12345
    assert message.startswith(read.origin.message)
    assert len(read.origin.message.encode()) <= limits.MAX_ERROR_MESSAGE_BYTES


def test_record_without_our_headers_is_no_dead_letter() -> None:
    with pytest.raises(InternalError, match="tailrace-dl-topic"):
        parse_dead_letter(None, b"", [("x", b"")])


@pytest.mark.parametrize(
    ("field", "value"),
    [("seq", "18446744073709551616"), ("epoch", "9223372036854775808"), ("index", "16"), ("logprobs", "NaN")],
)
def test_a_number_that_we_never_write_is_no_event(field: str, value: str) -> None:
    """An index of billions would make every reader hold as many choices."""
    event = encode_event(Delta("j", 1, 4, 3, "x", (9,), LOGPROBS))
    old = {"seq": b'"seq":4', "epoch": b'"epoch":1', "index": b'"index":3', "logprobs": b'"logprob":-0.25'}[
        field
    ]
    changed = event.replace(old, old.split(b":")[0] + b":" + value.encode())
    assert changed != event
    with pytest.raises(InternalError, match=field):
        parse_event(changed)


@pytest.mark.parametrize("number", ["NaN", "1e999", "9" * 30])
def test_a_result_whose_metadata_cannot_be_written_again_is_refused(number: str) -> None:
    data = Result("j", "completed", 1, "w", metadata={"k": [1]}).encode()
    with pytest.raises(InternalError, match="metadata"):
        parse_result(data.replace(b'{"k":[1]}', b'{"k":[' + number.encode() + b"]}"))


@pytest.mark.parametrize("data", [None, b"9223372036854775808", b"9" * 2000, b"1.5", b""])
def test_a_header_that_is_no_integer_of_64_bits_is_no_dead_letter(data: bytes | None) -> None:
    origin = Origin("tailrace.jobs", 3, 7, 1700000000000, 2, "invalid_json", "m")
    headers = dict(DeadLetter(None, None, (), origin).record_headers()) | {"tailrace-dl-offset": data}
    with pytest.raises(InternalError, match="tailrace-dl-offset"):
        parse_dead_letter(None, None, list(headers.items()))
