"""From a record of the jobs topic to a Job, or to the error that says why not."""

import json
import re
from collections import Counter
from typing import Any, NoReturn

import orjson
from pydantic import ValidationError

from service.errors import JobError
from service.wire import limits, openai_batch
from service.wire.job import JOB_FIELDS, Job
from service.wire.refusals import describe, job_error

_ID = re.compile(limits.ID_PATTERN.replace("$", r"\Z"))
_NON_JSON_NUMBER = re.compile(rb"-?(?:NaN|Infinity)\b")


def parse_job(
    value: bytes | None,
    *,
    key: bytes | None,
    timestamp_ms: int,
    max_record_bytes: int = limits.MAX_RECORD_BYTES,
) -> Job:
    """Decode and check one record; JobError is the only exception.

    `timestamp_ms` is the record's; Kafka's -1 means that it has none. A JobError carries the job's id when the
    value shows one, else the key where that could be an id: a result has to be filed under something.
    """
    fallback_id = readable_id(key)
    if value is None:
        raise JobError(
            "no_value", "value: null (a tombstone) is not a job", field="value", value="null",
            limit="a JSON object", job_id=fallback_id,
        )  # fmt: skip
    if len(value) > max_record_bytes:
        raise JobError(
            "record_too_large",
            f"value: {len(value)} bytes is above the limit {max_record_bytes}",
            field="value", value=len(value), limit=max_record_bytes, job_id=fallback_id,
        )  # fmt: skip
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        _refuse_unreadable(value, error, fallback_id)
    job = _job_of(document, value, fallback_id)
    if timestamp_ms < 0 and isinstance(job.deadline, float):
        raise JobError(
            "invalid_value", "deadline: seconds count from the record's timestamp, and it has none; give a time",
            field="deadline", value=job.deadline, limit="RFC 3339", job_id=job.id,
        )  # fmt: skip
    return job


def readable_id(key: bytes | None) -> str | None:
    """The key as a job id, when it could be one."""
    if not key or len(key) > limits.MAX_ID_CHARS:
        return None
    text = key.decode("ascii", errors="replace")
    return text if _ID.match(text) else None


def _job_of(document: Any, value: bytes, fallback_id: str | None) -> Job:
    if not isinstance(document, dict):
        shown = describe(document, private=True)
        raise JobError(
            "not_an_object", f"value: {shown} is not a JSON object", field="value", value=shown,
            limit="a JSON object", job_id=fallback_id,
        )  # fmt: skip
    is_batch_line = "custom_id" in document and "id" not in document
    job_id = _claimed_id(document, "custom_id" if is_batch_line else "id") or fallback_id
    if is_batch_line:
        job = openai_batch.job_of_line(document, job_id)
    else:
        try:
            job = Job.model_validate(document)
        except ValidationError as error:
            raise job_error(error, known=JOB_FIELDS, job_id=job_id) from None
    _refuse_duplicate_keys(document, value, job.id)
    return job


def _claimed_id(document: dict[str, Any], field: str) -> str | None:
    claimed = document.get(field)
    return claimed if isinstance(claimed, str) and _ID.match(claimed) else None


def _refuse_unreadable(value: bytes, error: orjson.JSONDecodeError, fallback_id: str | None) -> NoReturn:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError as bad:
        raise JobError(
            "invalid_utf8",
            f"value: byte 0x{value[bad.start]:02x} at offset {bad.start} is not valid UTF-8",
            field="value", value=f"byte 0x{value[bad.start]:02x} at offset {bad.start}", limit="UTF-8",
            job_id=fallback_id,
        ) from None  # fmt: skip
    if _NON_JSON_NUMBER.search(value) or "infinity" in error.msg:
        # Python's reader takes NaN, Infinity and 1e999, so the check of the fields can name the culprit.
        try:
            document = json.loads(value)
        except (ValueError, RecursionError):
            pass
        else:
            _job_of(document, value, fallback_id)
    place = f"line {error.lineno} column {error.colno}"
    raise JobError(
        "invalid_json", f"value: broken JSON at {place}: {error.msg}", field="value", value=place,
        limit="JSON (RFC 8259)", job_id=fallback_id,
    ) from None  # fmt: skip


def _refuse_duplicate_keys(document: dict[str, Any], value: bytes, job_id: str) -> None:
    """Two values for one field are a mistake that must not pick one silently.

    Only a document that holds the text of some key more often than it holds the key pays for the slow reader.
    """
    counts = _key_counts(document)
    if all(value.count(b'"%s"' % key.encode()) <= count for key, count in counts.items()):
        return
    repeated: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        merged = dict(pairs)
        if len(merged) < len(pairs):
            repeated.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return merged

    try:
        json.loads(value, object_pairs_hook=collect)
    except (ValueError, RecursionError):
        return  # orjson read it, so only the depth of free-form parts is left, and that is refused by field
    if repeated:
        name = repeated[0][: limits.MAX_SHOWN_CHARS]
        raise JobError(
            "duplicate_key", f"{name}: given more than once in one object; the limit is 1", field=name,
            value="given more than once", limit=1, job_id=job_id,
        )  # fmt: skip


def _key_counts(document: Any) -> dict[str, int]:
    """How many objects hold each key, at any depth."""
    counts: dict[str, int] = {}
    stack = [document]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            for key, child in part.items():
                counts[key] = counts.get(key, 0) + 1
                if isinstance(child, (dict, list)):
                    stack.append(child)
        else:
            stack.extend(child for child in part if isinstance(child, (dict, list)))
    return counts
