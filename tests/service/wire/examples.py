"""A valid job, and fields that make it invalid."""

from collections.abc import Iterator
from typing import Any

from service.wire import limits

GOOD = {"id": "job-1", "prompt": "Say hello."}


def bad_fields() -> Iterator[tuple[dict[str, Any], str]]:
    """(fields beside an id and a prompt, the message)."""
    yield {"temperature": 3.5}, "temperature: 3.5 is above the limit 2"
    yield {"temperature": -0.1}, "temperature: -0.1 is below the limit 0"
    yield {"temperature": True}, "temperature: true is not a number"
    yield {"temperature": "hot"}, "temperature: 'hot' is not a number"
    yield {"top_p": 0}, "top_p: 0 is not above the limit 0 (which is itself excluded)"
    yield {"top_p": 1.01}, "top_p: 1.01 is above the limit 1"
    yield {"top_k": -2}, "top_k: -2 is below the limit -1"
    yield {"min_p": 2}, "min_p: 2 is above the limit 1"
    yield {"max_tokens": 0}, "max_tokens: 0 is below the limit 1"
    yield {"max_tokens": -5}, "max_tokens: -5 is below the limit 1"
    yield {"max_tokens": 10**12}, f"max_tokens: 1000000000000 is above the limit {limits.MAX_NEW_TOKENS}"
    yield {"max_tokens": 1.5}, "max_tokens: 1.5 is not an integer"
    yield {"max_tokens": True}, "max_tokens: true is not an integer"
    yield {"min_tokens": 9, "max_tokens": 3}, "min_tokens: 9 is above the limit 3 (max_tokens)"
    yield {"seed": 2**63}, f"seed: {2**63} is above the limit {2**63 - 1}"
    yield {"presence_penalty": -2.5}, "presence_penalty: -2.5 is below the limit -2"
    yield {"frequency_penalty": 3}, "frequency_penalty: 3 is above the limit 2"
    yield (
        {"repetition_penalty": 0},
        "repetition_penalty: 0 is below the limit 0.01",
    )
    yield {"logprobs": 21}, "logprobs: 21 is above the limit 20"
    yield {"logprobs": True}, "logprobs: true is not an integer"
    yield {"n": 17}, "n: 17 is above the limit 16"
    yield {"logit_bias": {"7": 101}}, "logit_bias.7: 101 is above the limit 100"
    yield {"logit_bias": {"x": 1}}, "logit_bias.x: 'x' does not match ^(0|[1-9][0-9]{0,9})$"
    yield {"logit_bias": {"3000000000": 1}}, "logit_bias.3000000000: 3000000000 is above the limit 2147483647"
    many = {str(token_id): 1 for token_id in range(1025)}
    yield {"logit_bias": many}, "logit_bias: 1025 entries is above the limit 1024"
    yield {"stop": ["x"] * 10_000}, "stop: 10000 entries is above the limit 16"
    yield {"stop": "x" * 257}, "stop: a stop string of 257 characters is above the limit 256"
    yield {"stop": [""]}, "stop: a stop string is empty; it needs at least 1 character"
    yield {"stop": [-1]}, "stop: token id -1 is outside 0 to 2147483647"
    yield {"stop": [1.5]}, "stop: float is neither a string nor a token id"
    yield (
        {"service_class": "gold"},
        "service_class: 'gold' is not one of 'interactive', 'standard' or 'batch'",
    )
    yield {"slo": {"ttft_ms": -1}}, "slo.ttft_ms: -1 is not above the limit 0 (which is itself excluded)"
    yield {"slo": {"ttft": 5}}, "slo.ttft: unknown field"
    yield (
        {"deadline": "soon"},
        "deadline: 'soon' is not an RFC 3339 time with an offset, as in 2030-01-31T12:00:00Z",
    )
    yield (
        {"deadline": "2030-01-31T12:00:00"},
        (
            "deadline: '2030-01-31T12:00:00' is not an RFC 3339 time with an offset, as in 2030-01-31T12:00:00Z"
        ),
    )
    yield {"deadline": 0}, "deadline: 0 seconds is outside 0 (exclusive) to 2592000"
    yield {"deadline": True}, "deadline: bool is neither an RFC 3339 time nor a number of seconds"
    yield {"tenant": ""}, "tenant: empty; at least 1 character"
    yield {"model": "m" * 257}, "model: a string of 257 characters is above the limit 256"
    yield {"stream": 1}, "stream: 1 is not true or false"
    yield {"metadata": []}, "metadata: a list of 0 entries is not an object"
    yield {"metadata": {"k": "v" * 4090}}, "metadata: 4098 bytes is above the limit 4096"
    yield (
        {"response_format": {"type": "yaml"}},
        (
            "response_format.type: 'yaml' is not one of 'text', 'json_object', 'json_schema', 'regex', 'choice'"
        ),
    )
    yield (
        {"response_format": {"type": "regex", "regex": ""}},
        ("response_format.regex: empty; at least 1 character"),
    )
    yield (
        {"response_format": {"type": "choice", "choice": []}},
        ("response_format.choice: empty; at least 1 entry"),
    )
    yield {"temprature": 1}, "temprature: unknown field; did you mean temperature?"
    yield {"prompt": ""}, "prompt: empty; at least 1 character"
    yield {"prompt": 7}, "prompt: an integer is not a string"
    yield (
        {"prompt_token_ids": [1]},
        (
            "prompt: exactly one of messages, prompt, prompt_token_ids is needed, found prompt and prompt_token_ids"
        ),
    )
