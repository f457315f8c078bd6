"""Describes the topics and channels as an AsyncAPI 3.0 document."""

from typing import Any

_KEY = {"type": "string", "description": "The job's id."}


def _message(name: str, title: str, schema: str | None, **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"name": name, "title": title, "contentType": "application/json"}
    if schema is not None:
        message["payload"] = {"$ref": f"./{schema}.schema.json"}
    return message | more


def _kafka_topic(topic: str, description: str, message: str, **settings: Any) -> dict[str, Any]:
    return {
        "address": topic,
        "description": description,
        "servers": [{"$ref": "#/servers/kafka"}],
        "messages": {message: {"$ref": f"#/components/messages/{message}"}},
        "bindings": {"kafka": {"topic": topic, **settings, "bindingVersion": "0.5.0"}},
    }


def _redis_key(address: str, description: str, message: str | None) -> dict[str, Any]:
    channel: dict[str, Any] = {
        "address": address,
        "description": description,
        "servers": [{"$ref": "#/servers/redis"}],
        "messages": {message: {"$ref": f"#/components/messages/{message}"}} if message else {},
    }
    if "{id}" in address:
        channel["parameters"] = {"id": {"description": "The job's id."}}
    return channel


def _channels() -> dict[str, Any]:
    return {
        "jobs": _kafka_topic(
            "tailrace.jobs",
            "Jobs to run. The key is the job's id, or a session key when the order of submission matters.",
            "job",
        ),
        "results": _kafka_topic(
            "tailrace.results",
            "One effective outcome per job; the key is the job's id, and its last record counts.",
            "result",
            topicConfiguration={"cleanup.policy": ["compact", "delete"]},
        ),
        "deadLetters": _kafka_topic(
            "tailrace.dead-letter",
            "Records that could not be run: the original, and tailrace-dl-* headers after its own.",
            "deadLetter",
        ),
        "log": _redis_key(
            "tailrace:{{id}}:log",
            "Redis Stream, bounded and with a time to live; `tailrace` is the deployment's namespace. "
            "Each entry has one field `event` with the JSON. "
            "The inner braces of the address are the parameter, the outer ones are written: the hash tag.",
            "event",
        ),
        "live": _redis_key(
            "tailrace:{{id}}:live",
            "Redis pub/sub channel, at most once. Subscribe and wait for the confirmation, then read the "
            "log, then follow, dropping what has been seen by (epoch, seq).",
            "event",
        ),
        "cancelled": _redis_key(
            "tailrace:{{id}}:cancel",
            "Redis key with a time to live: set it, then publish the id on tailrace:control, to cancel the job.",
            None,
        ),
        "control": _redis_key(
            "tailrace:control", "Redis pub/sub channel that tells the workers of a cancellation.", None
        ),
    }


def _operations() -> dict[str, Any]:
    actions = {
        "runJob": ("receive", "jobs"),
        "publishResult": ("send", "results"),
        "publishDeadLetter": ("send", "deadLetters"),
        "appendEvent": ("send", "log"),
        "publishEvent": ("send", "live"),
    }
    return {
        name: {"action": action, "channel": {"$ref": f"#/channels/{channel}"}}
        for name, (action, channel) in actions.items()
    }


def _messages() -> dict[str, Any]:
    any_of = [{"$ref": "./job.schema.json"}, {"$ref": "./openai-batch-line.schema.json"}]
    key = {"kafka": {"key": _KEY, "bindingVersion": "0.5.0"}}
    headers = {
        "type": "object",
        "properties": {
            "traceparent": {"type": "string", "description": "W3C trace context; the job's trace goes on."},
            "tailrace-attempt": {
                "type": "string",
                "description": "How often the job was handed back before.",
            },
        },
    }
    return {
        "job": _message("job", "A generation to run", None, headers=headers, payload={"anyOf": any_of}),
        "result": _message("result", "How a job ended", "result", bindings=key),
        "deadLetter": {
            "name": "deadLetter",
            "title": "A record that could not be run",
            "headers": {"$ref": "./dead-letter.schema.json"},
            "payload": {"description": "The original record's bytes."},
        },
        "event": _message("event", "One step of a job's stream", "event"),
    }


def asyncapi_document() -> dict[str, Any]:
    """Return the document; its messages refer to the JSON Schemas beside it."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Tailrace",
            "version": "1",
            "description": "Event-driven LLM inference: jobs arrive on Kafka, tokens stream out through "
            "Redis. Topic names are the defaults; they are configurable.",
        },
        "defaultContentType": "application/json",
        "servers": {
            "kafka": {"host": "127.0.0.1:9092", "protocol": "kafka"},
            "redis": {"host": "127.0.0.1:6379", "protocol": "redis"},
        },
        "channels": _channels(),
        "operations": _operations(),
        "components": {"messages": _messages()},
    }
