"""OpenAI Batch lines in and out."""

from typing import Any

import orjson
import pytest

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
    parse_job,
)

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
        ({"messages": HELLO}, {"custom_id": "a b"}, "custom_id: 'a b' does not match "),
        ({"messages": HELLO}, {"priority": 1}, "priority: unknown field of a batch line"),
        ({"prompt": ["a", "b"]}, {"url": COMPLETIONS}, "body.prompt: a list of 2 prompts is above the limit 1"),
        ({"model": "m"}, {}, "body.prompt: exactly one of messages, prompt, prompt_token_ids is needed, found none"),
    ],
)  # fmt: skip
def test_bad_line_is_told_in_the_lines_own_words(
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


def test_output_line_of_a_job_that_did_not_complete() -> None:
    result = Result("r", "rejected", 1, "w", error=ErrorInfo("invalid_value", "n: 17 is above the limit 16"))
    line = batch_output(result, url=CHAT, model="m", created_s=7)
    assert line["response"] is None
    assert line["error"] == {"code": "invalid_value", "message": "n: 17 is above the limit 16"}
