"""Decodes a record of the jobs topic into a Job, or raises the error that says why it is not one."""

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

import orjson
from pydantic import ValidationError

from service.errors import JobError
from service.wire import limits, openai_batch
from service.wire.job import JOB_FIELDS, Job
from service.wire.refusals import describe, job_error, path_name, shown_name

BOM = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, which some editors put at the start of a file."""

_ID = re.compile(limits.ID_PATTERN.replace("$", r"\Z"))
_NON_JSON_NUMBER = re.compile(rb"-?(?:NaN|Infinity)\b")
_END_OF_KEY = re.compile(rb'"(?<!(?<!\\)\\")[ \t\n\r]*:')
"""Matches once for each key, however it is escaped. Other text matches only where a string begins with a colon or holds
an escaped backslash before a quote and a colon."""
_MAX_DIGITS = 4_300
"""The longest integer that Python reads."""


def parse_job(
    value: bytes | None,
    *,
    key: bytes | None,
    timestamp_ms: int,
    max_record_bytes: int = limits.MAX_RECORD_BYTES,
) -> Job:
    """Decode and check one record. Raises JobError and nothing else.

    `timestamp_ms` is the record's, see `record_time_ms`. A JobError carries the job's id when the value
    shows one, else the key where that could be an id: a result needs a key.
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
    value = value.removeprefix(BOM)
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        _refuse_unreadable(value, error, fallback_id)
    job = _job_of(document, value, fallback_id)
    if record_time_ms(timestamp_ms) is None and isinstance(job.deadline, float):
        raise JobError(
            "invalid_value",
            f"deadline: seconds count from the record's timestamp, and {timestamp_ms} ms is not one; give a time",
            field="deadline", value=job.deadline, limit="RFC 3339", job_id=job.id,
        )  # fmt: skip
    return job


def record_time_ms(timestamp_ms: int) -> int | None:
    """Return a record's timestamp in milliseconds since 1970; None for what cannot be one.

    Kafka's -1 and 0 cannot, nor can seconds, microseconds or nanoseconds in place of milliseconds.
    """
    return timestamp_ms if limits.MIN_TIMESTAMP_MS <= timestamp_ms < limits.MAX_TIMESTAMP_MS else None


def readable_id(key: bytes | None) -> str | None:
    """Return the key as a job id, or None when it cannot be one."""
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
    is_batch_line = openai_batch.is_line(document)
    if is_batch_line:
        job_id = openai_batch.job_id_of(document["custom_id"]) or fallback_id
        job = openai_batch.job_of_line(document, job_id)
    else:
        job_id = _claimed_id(document) or fallback_id
        try:
            job = Job.model_validate(document)
        except ValidationError as error:
            raise job_error(error, known=JOB_FIELDS, job_id=job_id) from None
    _refuse_duplicate_keys(document, value, job.id)
    return job


def claimed_custom_id(value: bytes | None) -> str | None:
    """Return the custom_id of a batch line that was refused, so that its result can name it."""
    if value is None or b"custom_id" not in value or len(value) > limits.MAX_RECORD_BYTES:
        return None
    try:
        document = json.loads(value.removeprefix(BOM))  # reads NaN too
        claimed = document["custom_id"] if openai_batch.is_line(document) else None
        orjson.dumps(claimed)  # half a surrogate pair cannot be written
    except (ValueError, RecursionError, TypeError):
        return None
    return claimed if openai_batch.job_id_of(claimed) is not None else None


def _claimed_id(document: dict[str, Any]) -> str | None:
    claimed = document.get("id")
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
        # Python's reader takes NaN, Infinity and 1e999, so the check of the fields can name the field at fault.
        try:
            document = json.loads(value, parse_int=_integer)
        except (ValueError, RecursionError):
            pass
        else:
            _refuse_free_form_number(_job_of(document, value, fallback_id), document)
    place = f"line {error.lineno} column {error.colno}"
    raise JobError(
        "invalid_json", f"value: broken JSON at {place}: {error.msg}", field="value", value=place,
        limit="JSON (RFC 8259)", job_id=fallback_id,
    ) from None  # fmt: skip


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def _refuse_free_form_number(job: Job, document: dict[str, Any]) -> None:
    """Refuse a number that JSON cannot write, in the parts of a job that may hold anything."""
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while stack:
        place, part = stack.pop()
        if isinstance(part, float) and not math.isfinite(part):
            field, shown = path_name(place), describe(part)
            raise JobError(
                "invalid_value", f"{field}: {shown} is not a finite number", field=field, value=shown,
                limit="finite numbers", job_id=job.id,
            )  # fmt: skip
        children = (
            part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        )
        stack.extend(((*place, name), child) for name, child in children)


def _refuse_duplicate_keys(document: dict[str, Any], value: bytes, job_id: str) -> None:
    """Refuse two values for one field, of which a reader would silently take one.

    The slow reader runs only for a record that seems to hold more keys than were read from it.
    """
    if len(_END_OF_KEY.findall(value)) <= _num_keys(document):
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
        # Nothing in the document is as deep, so what is has lost its place to a later value of the same field.
        repeated.append("value")
    if repeated:
        name = shown_name(repeated[0])
        raise JobError(
            "duplicate_key", f"{name}: given more than once in one object; the limit is 1", field=name,
            value="given more than once", limit=1, job_id=job_id,
        )  # fmt: skip


def _num_keys(document: Any) -> int:
    """Count the keys of all objects, at any depth."""
    count = 0
    stack = [document]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            count += len(part)
        children = part.values() if isinstance(part, dict) else part
        stack.extend(child for child in children if isinstance(child, (dict, list)))
    return count
