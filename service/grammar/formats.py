"""From a response_format to the text of its grammar."""

import json
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher

from service.errors import JobError
from service.grammar.schema_keywords import bad_keyword
from service.wire.response_format import (
    ChoiceFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    TextFormat,
)

_WHITESPACE: Final = r"[ \t]|\n[ \t]{0,32}"
"""Between the parts of JSON at most one blank, or a line break and its indentation. JSON itself
allows any number, so a model could write blanks until max_tokens and still follow its grammar."""

SCHEMA_FIELD: Final = "response_format.json_schema.schema"


class Grammar(NamedTuple):
    text: str
    """llguidance's JSON; None of it has been checked."""
    field: str
    """Where in the job it comes from."""
    source: str
    """What the job says there."""
    limit: str
    """What may stand there."""


def grammar_of(form: ResponseFormat, job_id: str | None = None) -> Grammar | None:
    """None for plain text. Raises JobError for a schema with keywords that would have no effect."""
    match form:
        case TextFormat():
            return None
        case JsonObjectFormat():
            return Grammar(_json_schema({"type": "object"}), "response_format", form.type, "a valid format")
        case JsonSchemaFormat():
            schema = form.json_schema.schema_
            _check_keywords(schema, job_id)
            return Grammar(_json_schema(schema), SCHEMA_FIELD, json.dumps(schema), "a valid JSON schema")
        case RegexFormat():
            text = LLMatcher.grammar_from_regex(form.regex)
            return Grammar(text, "response_format.regex", form.regex, "a valid regular expression")
        case ChoiceFormat():
            text = _choice(form.choice)
            return Grammar(text, "response_format.choice", json.dumps(form.choice), "valid choices")


def _check_keywords(schema: dict[str, Any], job_id: str | None) -> None:
    bad = bad_keyword(schema)
    if bad is None:
        return
    field = f"{SCHEMA_FIELD}.{bad.place}" if bad.place else SCHEMA_FIELD
    raise JobError(
        "invalid_grammar", f"{field}: {bad.keyword!r} {bad.reason}", field=field, value=bad.keyword,
        limit="keywords that are followed", job_id=job_id,
    )  # fmt: skip


def _json_schema(schema: dict[str, Any]) -> str:
    # `x-guidance` would let a job set llguidance's own options, also ones that no longer give JSON.
    plain = {key: value for key, value in schema.items() if key != "x-guidance"}
    return LLMatcher.grammar_from_json_schema(plain, overrides={"whitespace_pattern": _WHITESPACE})


def _choice(options: tuple[str, ...]) -> str:
    # Lark's strings are JSON's.
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(option) for option in options))
