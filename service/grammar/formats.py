"""Turns a response_format into the text of its grammar.

A JSON schema may use keywords that are followed or that only describe. llguidance ignores keywords that it does not
know, so a misspelled one would silently allow everything; it is refused here.
"""

import difflib
import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher

from service.errors import JobError
from service.wire.limits import MAX_SHOWN_CHARS
from service.wire.refusals import path_name
from service.wire.response_format import (
    ChoiceFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    TextFormat,
)

_WHITESPACE: Final = r"[ \t]|\n[ \t]{0,32}"
"""Allows one blank, or a line break and its indentation, between the parts of JSON. JSON itself allows any number,
so a model could write blanks until max_tokens and still follow its grammar."""

SCHEMA_FIELD: Final = "response_format.json_schema.schema"


Path = tuple[str | int, ...]

_SCHEMA: Final = frozenset({"items", "additionalItems", "additionalProperties"})
_LIST_OF_SCHEMAS: Final = frozenset({"items", "prefixItems", "anyOf", "allOf", "oneOf"})
_SCHEMAS_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_FOLLOWED: Final = (
    _SCHEMA
    | _LIST_OF_SCHEMAS
    | _SCHEMAS_BY_NAME
    | {
        *("type", "enum", "const", "$ref", "$id", "id", "$anchor", "$schema"),
        *("minItems", "maxItems", "required", "minProperties", "maxProperties"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format"),
    }
)
_DESCRIBING: Final = frozenset(
    (
        *("title", "description", "default", "example", "examples", "$comment", "deprecated"),
        *("readOnly", "writeOnly", "discriminator", "$vocabulary"),
    )
)
_INSTEAD: Final = {"nullable": 'write "type": [..., "null"] instead'}
_UNSUPPORTED: Final = frozenset(
    (
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
        *("propertyNames", "unevaluatedProperties", "unevaluatedItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "$dynamicRef", "$dynamicAnchor"),
        *("$recursiveRef", "$recursiveAnchor", "contentEncoding", "contentMediaType", "contentSchema"),
    )
)
"""Keywords of JSON Schema that are not followed. The last three would seem to constrain the text."""


class Grammar(NamedTuple):
    text: str
    """llguidance's JSON, not yet validated."""
    field: str
    """The field of the job that holds the grammar."""
    source: str
    """The value of that field."""
    limit: str
    """The values that the field allows."""


def grammar_of(form: ResponseFormat, job_id: str | None = None) -> Grammar | None:
    """Return the grammar of a response format; None for plain text.

    Raises JobError for a schema with keywords that would have no effect.
    """
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
    # `x-guidance` would let a job set llguidance's own options, some of which give text that is not JSON.
    plain = {key: value for key, value in schema.items() if key != "x-guidance"}
    return LLMatcher.grammar_from_json_schema(plain, overrides={"whitespace_pattern": _WHITESPACE})


def _choice(options: tuple[str, ...]) -> str:
    # Lark writes strings as JSON does.
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(option) for option in options))


class BadKeyword(NamedTuple):
    place: str
    """The path of the part that has it, as in `properties.name`; empty for the whole schema."""
    keyword: str
    reason: str


def bad_keyword(schema: dict[str, Any]) -> BadKeyword | None:
    """Return the first keyword that would have no effect, in any part of the schema, used or not."""
    seen: set[int] = set()
    stack: list[tuple[Path, Any]] = [((), schema)]
    while stack:
        path, part = stack.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        for keyword in part:
            if not (keyword in _FOLLOWED or keyword in _DESCRIBING or keyword.startswith("x-")):
                return BadKeyword(path_name(path), keyword[:MAX_SHOWN_CHARS], _reason(keyword))
        stack.extend(reversed([*_parts(path, part), *_referred(part.get("$ref"), schema)]))
    return None


def _parts(path: Path, schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas inside `schema`; names of properties and values of `enum` or `default` are not keywords."""
    for keyword, value in schema.items():
        if keyword in _SCHEMA and isinstance(value, dict):
            yield (*path, keyword), value
        elif keyword in _LIST_OF_SCHEMAS and isinstance(value, list):
            yield from (((*path, keyword, position), entry) for position, entry in enumerate(value))
        elif keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from (((*path, keyword, name), entry) for name, entry in value.items())


def _referred(reference: Any, schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the schema that a pointer such as `#/x-parts/name` refers to; llguidance reports a pointer to nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return
    path: list[str | int] = []
    part: Any = schema
    for name in reference[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, dict) and name in part:
            part = part[name]
        else:
            return
        path.append(name)
    yield tuple(path), part


def _reason(keyword: str) -> str:
    if keyword in _UNSUPPORTED:
        return "is not supported"
    if keyword in _INSTEAD:
        return f"is not a keyword of JSON Schema; {_INSTEAD[keyword]}"
    near = difflib.get_close_matches(keyword[:MAX_SHOWN_CHARS], sorted(_FOLLOWED), n=1)
    return f"is not a keyword of JSON Schema{f'; did you mean {near[0]}?' if near else ''}"
