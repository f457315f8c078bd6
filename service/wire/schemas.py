"""Writes the published schemas of the formats: `python -m service.wire.schemas [FOLDER]`."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from service.wire import limits, openai_batch
from service.wire.asyncapi import asyncapi_document
from service.wire.dead_letter import Origin, header_name
from service.wire.event import event_adapter
from service.wire.fields import nullable
from service.wire.job import PROMPT_FIELDS, job_schema
from service.wire.openai_fields import EMPTY, REQUEST_FIELDS
from service.wire.result import result_adapter

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _headed(title: str, schema: dict[str, Any]) -> dict[str, Any]:
    schema = {name: part for name, part in schema.items() if name not in ("title", "$schema")}
    return {"$schema": _DIALECT, "title": title, **schema}


def job_document() -> dict[str, Any]:
    schema = job_schema()
    schema["oneOf"] = [_gives(name) for name in PROMPT_FIELDS]
    return _headed("Tailrace job, version 1", schema)


def _gives(field: str) -> dict[str, Any]:
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}}}


def batch_line_document() -> dict[str, Any]:
    """Describe a line of an OpenAI Batch file; its fields take their types from the job's."""
    job = job_schema()
    bodies = []
    for url, names in openai_batch.BODY_FIELDS.items():
        properties = {name: nullable(_body_field(name, url, job)) for name in sorted(names)}
        for name in sorted(REQUEST_FIELDS):
            empty = {"enum": list(EMPTY)}
            properties[name] = {"anyOf": [properties[name], empty]} if name in properties else empty
        body = {"type": "object", "properties": properties, "additionalProperties": {"type": "null"}}
        bodies.append({"properties": {"url": {"const": url}, "body": body}})
    schema = {
        "type": "object",
        "properties": {
            "custom_id": {
                "type": "string",
                "minLength": 1,
                "maxLength": limits.MAX_CUSTOM_ID_CHARS,
                "description": "The job's id where it has the form of one (1 to 128 of A-Z a-z 0-9 . _ : -). Else the "
                "id is its first 64 characters with - for those that an id cannot have, a colon, and the first 32 hex "
                "digits of its SHA-256. The result carries it as custom_id either way.",
            },
            "method": {"enum": ["POST", None]},
            "url": {"enum": list(openai_batch.BODY_FIELDS)},
            "body": {"type": "object"},
        },
        "required": ["custom_id", "url", "body"],
        "additionalProperties": {"type": "null"},
        "oneOf": bodies,
        "$defs": job["$defs"],
    }
    return _headed("Line of an OpenAI Batch file, as Tailrace accepts it", schema)


def _body_field(name: str, url: str, job: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = job["properties"]
    if name == "logprobs" and url == openai_batch.CHAT_URL:
        return {"type": "boolean"}
    if name == "prompt":
        ids, text = own["prompt_token_ids"], own["prompt"]
        one_prompt = {"type": "array", "prefixItems": [{"anyOf": [ids, text]}], "minItems": 1, "maxItems": 1}
        return {"anyOf": [text, ids, one_prompt]}
    if name == "stop_token_ids":
        return {"type": "array", "items": {"type": "integer"}, "maxItems": limits.MAX_STOPS}
    renamed = {"top_logprobs": "logprobs", "max_completion_tokens": "max_tokens", "user": "tenant"}
    field: dict[str, Any] = own[renamed.get(name, name)]
    return field


def event_document() -> dict[str, Any]:
    return _headed("Tailrace event, version 1", event_adapter().json_schema(mode="validation"))


def result_document() -> dict[str, Any]:
    return _headed("Tailrace result, version 1", result_adapter().json_schema(mode="validation"))


def dead_letter_document() -> dict[str, Any]:
    """Describe a dead letter's headers; its value and key are the original's bytes."""
    numbers = {"partition", "offset", "timestamp_ms", "attempt"}
    properties = {
        header_name(name): {"type": "string", "pattern": "^-?[0-9]+$"}
        if name in numbers
        else {"type": "string"}
        for name in Origin.__slots__
    }
    schema = {
        "description": "The last headers of a record on the dead-letter topic, as UTF-8 text, in this order; "
        "the original record's headers come before them. Key and value are the original's bytes.",
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }
    return _headed("Headers of a Tailrace dead letter, version 1", schema)


def documents() -> dict[str, str]:
    """Return every generated file's text by name."""
    schemas = {
        "job": job_document(),
        "openai-batch-line": batch_line_document(),
        "event": event_document(),
        "result": result_document(),
        "dead-letter": dead_letter_document(),
    }
    files = {
        f"{name}.schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        for name, schema in schemas.items()
    }
    files["asyncapi.yaml"] = yaml.safe_dump(
        asyncapi_document(), sort_keys=False, allow_unicode=True, width=110
    )
    return files


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in documents().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "ops" / "schemas")
