"""From a response_format to the text of its grammar."""

import json
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher

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


class Grammar(NamedTuple):
    text: str
    """llguidance's JSON; None of it has been checked."""
    field: str
    """Where in the job it comes from."""
    source: str
    """What the job says there."""


def grammar_of(form: ResponseFormat) -> Grammar | None:
    """None for plain text."""
    match form:
        case TextFormat():
            return None
        case JsonObjectFormat():
            return Grammar(_json_schema({"type": "object"}), "response_format", form.type)
        case JsonSchemaFormat():
            schema = form.json_schema.schema_
            return Grammar(_json_schema(schema), "response_format.json_schema.schema", json.dumps(schema))
        case RegexFormat():
            return Grammar(LLMatcher.grammar_from_regex(form.regex), "response_format.regex", form.regex)
        case ChoiceFormat():
            return Grammar(_choice(form.choice), "response_format.choice", json.dumps(form.choice))


def _json_schema(schema: dict[str, Any]) -> str:
    # `x-guidance` would let a job set llguidance's own options, also ones that no longer give JSON.
    plain = {key: value for key, value in schema.items() if key != "x-guidance"}
    return LLMatcher.grammar_from_json_schema(plain, overrides={"whitespace_pattern": _WHITESPACE})


def _choice(options: tuple[str, ...]) -> str:
    # Lark's strings are JSON's.
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(option) for option in options))
