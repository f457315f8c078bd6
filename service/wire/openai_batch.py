"""Lines of OpenAI Batch files: turns input lines into jobs, and results into output lines that OpenAI's tools read."""

import codecs
import hashlib
import re
from itertools import accumulate
from typing import Any

from pydantic import ValidationError

from service.errors import JobError
from service.wire import limits
from service.wire.common import TokenLogprob, TopLogprob, distinct_names, token_bytes
from service.wire.job import JOB_FIELDS, Job
from service.wire.openai_fields import REQUEST_FIELDS, is_empty
from service.wire.refusals import describe, job_error, shown_name, unknown_field
from service.wire.result import Choice, Result

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
LINE_FIELDS = ("custom_id", "method", "url", "body")

# Fields of a body that mean the same as the job's field of the same name; the last six are vLLM's.
_SHARED = frozenset(
    (
        *("model", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "metadata", "stream", "response_format"),
        *("min_tokens", "top_k", "min_p", "repetition_penalty", "ignore_eos", "return_token_ids"),
    )
)
_RENAMED = {"max_completion_tokens": "max_tokens", "user": "tenant"}
_CHAT_ONLY = frozenset({"messages", "logprobs", "top_logprobs", "stop_token_ids"})
_COMPLETIONS_ONLY = frozenset({"prompt", "logprobs", "stop_token_ids"})
BODY_FIELDS = {
    CHAT_URL: _SHARED | _RENAMED.keys() | _CHAT_ONLY,
    COMPLETIONS_URL: _SHARED | _RENAMED.keys() | _COMPLETIONS_ONLY,
}

_PLAIN_ID = re.compile(limits.ID_PATTERN.strip("^$"))
_NOT_OF_AN_ID = re.compile(r"[^A-Za-z0-9._:-]")
_MAX_READABLE_CHARS = 64


def _refuse(field: str, reason: str, value: Any, limit: str | int, job_id: str | None) -> JobError:
    return JobError(
        "invalid_value", f"{field}: {reason}", field=field, value=describe(value, private=True), limit=limit,
        job_id=job_id,
    )  # fmt: skip


def is_line(document: Any) -> bool:
    """Tell whether a record is a batch line and not a job."""
    return isinstance(document, dict) and "custom_id" in document and document.get("id") is None


def job_id_of(custom_id: Any) -> str | None:
    """Return the id of a line's job: the custom_id where that is a valid id, else its readable part and its hash.

    Returns None for an invalid custom_id. The hash keeps different custom_ids apart, and apart from plain ids.
    """
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= limits.MAX_CUSTOM_ID_CHARS:
        return None
    if _PLAIN_ID.fullmatch(custom_id):
        return custom_id
    hashed = hashlib.sha256(custom_id.encode(errors="surrogatepass")).hexdigest()
    return f"{_NOT_OF_AN_ID.sub('-', custom_id[:_MAX_READABLE_CHARS])}:{hashed[:32]}"


def job_of_line(line: dict[str, Any], job_id: str | None) -> Job:
    """Return the job that a line asks for. Raises JobError, which names the line's own fields."""
    line = {name: value for name, value in line.items() if value is not None or name == "custom_id"}
    unknown = next((name for name in line if name not in LINE_FIELDS), None)
    if unknown is not None:
        field = shown_name(unknown)
        raise JobError(
            "unknown_field", f"{field}: unknown field of a batch line", field=field,
            value=describe(line[unknown], private=True), limit=", ".join(LINE_FIELDS), job_id=job_id,
        )  # fmt: skip
    if line.get("method", "POST") != "POST":
        raise _refuse("method", f"{describe(line['method'])} is not POST", line["method"], "POST", job_id)
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or url not in BODY_FIELDS:
        allowed = " or ".join(BODY_FIELDS)
        raise JobError(
            "invalid_value", f"url: {describe(url)} is not {allowed}", field="url", value=describe(url),
            limit=allowed, job_id=job_id,
        )  # fmt: skip
    _check_custom_id(line["custom_id"], job_id)
    if not isinstance(body, dict):
        raise _refuse("body", f"{describe(body, private=True)} is not an object", body, "an object", job_id)
    return _job_of_body(line["custom_id"], url, body, job_id)


def _check_custom_id(custom_id: Any, job_id: str | None) -> None:
    limit = limits.MAX_CUSTOM_ID_CHARS
    if not isinstance(custom_id, str):
        raise _refuse("custom_id", f"{describe(custom_id)} is not a string", custom_id, "a string", job_id)
    if not custom_id:
        raise _refuse("custom_id", "empty; at least 1 character", custom_id, 1, job_id)
    if len(custom_id) > limit:
        reason = f"a string of {len(custom_id)} characters is above the limit {limit}"
        raise _refuse("custom_id", reason, custom_id, limit, job_id)


def _job_of_body(custom_id: str, url: str, body: dict[str, Any], job_id: str | None) -> Job:
    # OpenAI's clients write null for a field that is not given.
    fields = {name: value for name, value in body.items() if not _is_absent(name, value)}
    unknown = next((name for name in fields if name not in BODY_FIELDS[url]), None)
    if unknown is not None:
        field = f"body.{shown_name(unknown)}"
        reason, limit = unknown_field(field, BODY_FIELDS[url])
        raise JobError(
            "unknown_field", f"{field}: {reason}", field=field,
            value=describe(fields[unknown], private=True), limit=limit, job_id=job_id,
        )  # fmt: skip
    if "max_completion_tokens" in fields and "max_tokens" in fields:
        raise _refuse(
            "body.max_completion_tokens", "given together with max_tokens; the limit is one of them",
            fields["max_completion_tokens"], 1, job_id,
        )  # fmt: skip
    document: dict[str, Any] = {
        _RENAMED.get(name, name): value
        for name, value in fields.items()
        if name in _SHARED or name in _RENAMED
    }
    document |= {"id": job_id_of(custom_id), "custom_id": custom_id}
    _merge_stop_token_ids(document, fields.get("stop_token_ids"), job_id)
    if url == CHAT_URL:
        _map_chat(document, fields, job_id)
    else:
        _map_completion(document, fields, job_id)
    try:
        return Job.model_validate(document)
    except ValidationError as error:
        raise _as_line_error(job_error(error, known=JOB_FIELDS, job_id=job_id), fields) from None


def _is_absent(name: str, value: Any) -> bool:
    return value is None or (name in REQUEST_FIELDS and is_empty(value))


def _merge_stop_token_ids(document: dict[str, Any], ids: Any, job_id: str | None) -> None:
    if ids is None:
        return
    if not isinstance(ids, list) or not all(type(entry) is int for entry in ids):
        raise _refuse("body.stop_token_ids", "not a list of integers", ids, "a list of integers", job_id)
    stop = document.get("stop", [])
    document["stop"] = [*(stop if isinstance(stop, list) else [stop]), *ids]


def _map_chat(document: dict[str, Any], fields: dict[str, Any], job_id: str | None) -> None:
    document["messages"] = fields.get("messages")
    wanted, top = fields.get("logprobs", False), fields.get("top_logprobs")
    if not isinstance(wanted, bool):
        reason = f"{describe(wanted)} is not true or false"
        raise _refuse("body.logprobs", reason, wanted, "true or false", job_id)
    if top is not None and not wanted:
        raise _refuse("body.top_logprobs", "needs logprobs: true", top, "logprobs: true", job_id)
    if wanted:
        document["logprobs"] = top if top is not None else 0


def _map_completion(document: dict[str, Any], fields: dict[str, Any], job_id: str | None) -> None:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and any(not isinstance(entry, int) for entry in prompt):
        reason = f"a list of {len(prompt)} prompts is above the limit 1 of a line"
        raise _refuse("body.prompt", reason, prompt, 1, job_id)
    document["prompt_token_ids" if isinstance(prompt, list) else "prompt"] = prompt
    if "logprobs" in fields:
        document["logprobs"] = fields["logprobs"]


def _as_line_error(error: JobError, fields: dict[str, Any]) -> JobError:
    """Rename the error's field to the line's: body.… or custom_id."""
    theirs = {ours: name for name, ours in _RENAMED.items() if name in fields}
    theirs |= {"prompt_token_ids": "prompt"} | (
        {"logprobs": "top_logprobs"} if "top_logprobs" in fields else {}
    )
    field = error.field or ""
    root = field.split("[", 1)[0].split(".", 1)[0]
    renamed = f"body.{theirs.get(root, root)}{field[len(root) :]}"
    message = error.message
    message = renamed + message.removeprefix(field) if message.startswith(field) else message
    return JobError(
        error.code, message, field=renamed, value=error.value, limit=error.limit, job_id=error.job_id
    )


def batch_output(result: Result, *, url: str, model: str, created_s: int) -> dict[str, Any]:
    """Write `result` as a line of an OpenAI Batch output file; `url` is its request line's."""
    line: dict[str, Any] = {"id": f"batch_req_{result.id}", "custom_id": result.custom_id or result.id}
    if result.status != "completed":
        error = result.error
        code, message = (
            (error.code, error.message) if error else (result.status, f"the job was {result.status}")
        )
        return line | {"response": None, "error": {"code": code, "message": message}}
    chat = url == CHAT_URL
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{result.id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": [(_chat_choice if chat else _completion_choice)(choice) for choice in result.choices],
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "total_tokens": result.usage.prompt_tokens + result.usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens},
        },
    }
    response = {"status_code": 200, "request_id": result.id, "body": body}
    return line | {"response": response, "error": None}


def _chat_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = {"content": [_chat_logprob(entry) for entry in choice.logprobs]}
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text},
        "finish_reason": choice.finish_reason,
        "logprobs": logprobs,
    }


def _chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    return _with_bytes(entry) | {"top_logprobs": [_with_bytes(other) for other in entry.top]}


def _with_bytes(entry: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(token_bytes(entry.token))}


def _completion_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = {
            "tokens": [entry.token for entry in choice.logprobs],
            "token_logprobs": [entry.logprob for entry in choice.logprobs],
            "top_logprobs": [_by_name(entry) for entry in choice.logprobs],
            "text_offset": _text_offsets(choice.logprobs),
        }
    return {
        "index": choice.index,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "logprobs": logprobs,
    }


def _by_name(entry: TokenLogprob) -> dict[str, float]:
    """Return one entry per token; the sampled token keeps the name that `tokens` gives it."""
    logprobs = {other.token_id: other.logprob for other in entry.top} | {entry.token_id: entry.logprob}
    named = [(entry.token_id, entry.token), *((other.token_id, other.token) for other in entry.top)]
    names = distinct_names(named)
    return {names[token_id]: logprob for token_id, logprob in logprobs.items()}


def _text_offsets(logprobs: tuple[TokenLogprob, ...]) -> list[int]:
    """Return where each token begins, in characters from the first; parts of a character begin where it does."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    lengths = [len(decoder.decode(token_bytes(entry.token))) for entry in logprobs[:-1]]
    return list(accumulate(lengths, initial=0)) if logprobs else []
