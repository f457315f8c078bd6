"""OpenAI Batch lines in and out."""

import hashlib
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import JobError
from service.wire import (
    Choice,
    ErrorInfo,
    Job,
    Result,
    TokenLogprob,
    TopLogprob,
    Usage,
    batch_output,
    claimed_custom_id,
    limits,
    parse_job,
    parse_result,
)
from service.wire.common import distinct_names, token_name

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def parse(body: dict[str, Any], url: str = CHAT, **more: Any) -> Job:
    line = {"custom_id": "request-1", "method": "POST", "url": url, "body": body, **more}
    return parse_job(orjson.dumps(line), key=None, timestamp_ms=0)


def test_chat_line_is_accepted_as_it_is() -> None:
    job = parse(
        {
            "model": "smollm2",
            "messages": HELLO,
            "max_completion_tokens": 9,
            "temperature": 0,
            "stop": ["END"],
            "stop_token_ids": [5],
            "logprobs": True,
            "top_logprobs": 3,
            "user": "u-1",
            "metadata": {"k": "v"},
            "stream": False,
            "seed": None,
        }
    )
    assert (job.id, job.model, job.max_tokens, job.temperature) == ("request-1", "smollm2", 9, 0.0)
    assert (job.stop_strings, job.stop_token_ids) == (("END",), {5})
    assert (job.logprobs, job.tenant, job.metadata, job.stream) == (3, "u-1", {"k": "v"}, False)


@pytest.mark.parametrize(
    ("prompt", "field", "value"),
    [
        ("Once", "prompt", "Once"),
        (["Once"], "prompt", "Once"),
        ([1, 2], "prompt_token_ids", (1, 2)),
        ([[1, 2]], "prompt_token_ids", (1, 2)),
    ],
)
def test_completions_line(prompt: Any, field: str, value: Any) -> None:
    job = parse({"model": "m", "prompt": prompt, "logprobs": 2, "max_tokens": 4}, url=COMPLETIONS)
    assert getattr(job, field) == value
    assert job.logprobs == 2


@pytest.mark.parametrize(
    ("body", "more", "message"),
    [
        ({"messages": HELLO, "tools": [{}]}, {}, "body.tools: not supported; it may only be null or empty"),
        ({"messages": HELLO, "best_of": 0}, {}, "body.best_of: not supported; it may only be null or empty"),
        ({"messages": HELLO, "temprature": 1}, {}, "body.temprature: unknown field; did you mean temperature?"),
        ({"messages": HELLO, "temperature": 9}, {}, "body.temperature: 9 is above the limit 2"),
        ({"messages": HELLO, "max_completion_tokens": 0}, {}, "body.max_completion_tokens: 0 is below the limit 1"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, {}, "body.top_logprobs: 21 is above the limit 20"),
        ({"messages": HELLO, "top_logprobs": 2}, {}, "body.top_logprobs: needs logprobs: true"),
        ({"messages": HELLO, "logprobs": 2}, {}, "body.logprobs: 2 is not true or false"),
        ({"messages": [{"role": "robot", "content": ""}]}, {}, "body.messages[0].role: 'robot' is not one of "),
        ({"messages": HELLO}, {"url": "/v1/embeddings"}, f"url: '/v1/embeddings' is not {CHAT} or {COMPLETIONS}"),
        ({"messages": HELLO}, {"method": "GET"}, "method: 'GET' is not POST"),
        ({"messages": HELLO}, {"custom_id": ""}, "custom_id: empty; at least 1 character"),
        ({"messages": HELLO}, {"custom_id": 5}, "custom_id: 5 is not a string"),
        ({"messages": HELLO}, {"custom_id": "é" * 513}, "custom_id: a string of 513 characters is above the limit 512"),
        ({"messages": HELLO}, {"priority": 1}, "priority: unknown field of a batch line"),
        ({"prompt": ["a", "b"]}, {"url": COMPLETIONS}, "body.prompt: a list of 2 prompts is above the limit 1"),
        ({"model": "m"}, {}, "body.prompt: exactly one of messages, prompt, prompt_token_ids is needed, found none"),
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_by_the_lines_own_fields(
    body: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError) as caught:
        parse(body, **{"url": CHAT, **more})
    assert caught.value.message.startswith(message)
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    assert caught.value.job_id == (None if "custom_id" in more else "request-1")


def test_output_line_of_a_chat() -> None:
    logprobs = (TokenLogprob("Hi", 5, -0.5, (TopLogprob("Hi", 5, -0.5),)),)
    result = Result(
        "request-1", "completed", 1, "w", (Choice(0, "Hi", "stop", None, logprobs),), Usage(3, 1, 2)
    )
    line = batch_output(result, url=CHAT, model="m", created_s=7)
    assert line["custom_id"] == "request-1"
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    body = line["response"]["body"]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -0.5
    assert body["usage"]["total_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_output_line_of_a_completion() -> None:
    logprobs = tuple(TokenLogprob(word, token_id, -1.0) for token_id, word in enumerate(("Hi", " you", "!")))
    result = Result("r", "completed", 1, "w", (Choice(0, "Hi you!", "length", None, logprobs),))
    choice = batch_output(result, url=COMPLETIONS, model="m", created_s=7)["response"]["body"]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hi you!", "length")
    assert choice["logprobs"]["text_offset"] == [0, 2, 6]


def job_named(custom_id: str) -> Job:
    return parse({"messages": HELLO}, custom_id=custom_id)


@pytest.mark.parametrize(
    "custom_id", ["a b", "Ä-é", "path/to/file.txt", "x" * 129, "x" * 512, "\n", "🦉" * 512, "a\0b"]
)
def test_any_string_is_a_custom_id_and_gives_a_legal_job_id(custom_id: str) -> None:
    job = job_named(custom_id)
    assert re.fullmatch(limits.ID_PATTERN, job.id)
    assert job.id == job_named(custom_id).id, "a redelivered line has the same id"
    assert job.custom_id == custom_id
    assert job.id.endswith(hashlib.sha256(custom_id.encode()).hexdigest()[:32])
    result = Result(job.id, "completed", 1, "w", custom_id=job.custom_id)
    assert parse_result(result.encode()) == result
    assert batch_output(result, url=CHAT, model="m", created_s=7)["custom_id"] == custom_id


def test_custom_id_that_is_an_id_is_the_jobs() -> None:
    for custom_id in ("request-1", "Az09._:-" * 16):
        assert (job_named(custom_id).id, job_named(custom_id).custom_id) == (custom_id, custom_id)
    assert job_named("path/to/file.txt").id.startswith("path-to-file.txt:")


@given(st.lists(st.text(st.sampled_from("aA-:/ é"), min_size=1, max_size=4), unique=True))
def test_different_custom_ids_give_different_job_ids(custom_ids: list[str]) -> None:
    assert len({job_named(custom_id).id for custom_id in custom_ids}) == len(custom_ids)


@pytest.mark.parametrize(
    ("value", "custom_id"),
    [
        (b'{"custom_id":"a b","url":"/v1/completions","body":{"prompt":"x","n":99}}', "a b"),
        (b'\xef\xbb\xbf{"custom_id":"a b","url":"nowhere"}', "a b"),
        (b'{"custom_id":"a b","url":"/v1/completions","body":{"prompt":"x","top_p":NaN}}', "a b"),
        (b'{"custom_id":"\\ud800","body":{"top_p":NaN}}', None),
        (b'{"custom_id":5}', None),
        (b'{"custom_id":""}', None),
        (b'{"id":"a","custom_id":7}', None),
        (b"[1]", None),
        (b"not json", None),
        (b"[" * 100_000, None),
        (None, None),
    ],
    ids=range(11),
)
def test_refused_line_is_found_by_its_custom_id(value: bytes | None, custom_id: str | None) -> None:
    with pytest.raises(JobError) as refused:
        parse_job(value, key=b"key", timestamp_ms=0)
    assert claimed_custom_id(value) == custom_id
    assert refused.value.job_id == (job_named(custom_id).id if custom_id else refused.value.job_id)


def row_of(url: str, *logprobs: TokenLogprob) -> dict[str, Any]:
    result = Result("r", "completed", 1, "w", (Choice(0, "", "length", None, logprobs),))
    choice = batch_output(result, url=url, model="m", created_s=7)["response"]["body"]["choices"][0]
    row: dict[str, Any] = choice["logprobs"]
    return row


EMOJI = [token_name(bytes([byte])) for byte in "🦉".encode()]
"""Its four bytes, as tokens of a byte-level vocabulary."""


def test_no_entry_of_top_logprobs_is_lost_where_tokens_share_a_text() -> None:
    top = tuple(TopLogprob(token_name(bytes([0x80 + i])), i, -1.0 - i) for i in range(18))
    top += (TopLogprob("A", 65, -20.0), TopLogprob("A", 365, -21.0), TopLogprob("A", 465, -22.0))
    sampled = TokenLogprob("A", 365, -21.0, top)
    row = row_of(COMPLETIONS, sampled, TokenLogprob(top[3].token, 3, -4.0, top))
    for entries in row["top_logprobs"]:
        assert sorted(entries.values(), reverse=True) == [entry.logprob for entry in top]
    assert row["top_logprobs"][0][r"bytes:\x80"] == -1.0
    assert {name: value for name, value in row["top_logprobs"][0].items() if name.startswith("A")} == {
        "A (token_id:65)": -20.0, "A": -21.0, "A (token_id:465)": -22.0
    }  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["A", "�", "A (token_id:1)", r"bytes:\x80"]))))
def test_names_of_different_tokens_differ(tokens: list[tuple[int, str]]) -> None:
    names = distinct_names(tokens)
    assert names.keys() == dict(tokens).keys()
    assert len(set(names.values())) == len(names)
    assert not tokens or names[tokens[0][0]] == tokens[0][1], "the first one's name is as it was"


def test_sampled_token_has_its_own_value_in_top_logprobs_even_below_the_others() -> None:
    top = (TopLogprob("a", 1, -0.1), TopLogprob("b", 2, -2.5))
    row = row_of(COMPLETIONS, TokenLogprob("z", 26, -9.0, top), TokenLogprob("b", 2, -2.5, top))
    assert row["top_logprobs"] == [{"a": -0.1, "b": -2.5, "z": -9.0}, {"a": -0.1, "b": -2.5}]
    for name, value, entries in zip(row["tokens"], row["token_logprobs"], row["top_logprobs"], strict=True):
        assert entries[name] == value


def test_text_offsets_count_characters_and_not_names() -> None:
    names = ["é", *EMOJI, " you", "!"]
    row = row_of(COMPLETIONS, *(TokenLogprob(name, i, -1.0) for i, name in enumerate(names)))
    assert row["text_offset"] == [0, 1, 1, 1, 1, 2, 6]


def test_bytes_of_a_chats_tokens_join_to_its_text() -> None:
    names = ["é", *EMOJI, " you"]
    row = row_of(
        CHAT, *(TokenLogprob(name, i, -1.0, (TopLogprob(name, i, -1.0),)) for i, name in enumerate(names))
    )
    joined = [byte for entry in row["content"] for byte in entry["bytes"]]
    assert bytes(joined).decode() == "é🦉 you"
    assert [entry["top_logprobs"][0]["bytes"] for entry in row["content"][1:5]] == [
        [b] for b in "🦉".encode()
    ]


def test_output_line_of_a_job_that_did_not_complete() -> None:
    result = Result("r", "rejected", 1, "w", error=ErrorInfo("invalid_value", "n: 17 is above the limit 16"))
    line = batch_output(result, url=CHAT, model="m", created_s=7)
    assert line["response"] is None
    assert line["error"] == {"code": "invalid_value", "message": "n: 17 is above the limit 16"}
