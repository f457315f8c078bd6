"""Which keywords a JSON schema may use: those that are followed, and those that only describe.

llguidance passes over keywords that it does not know, so a misspelled one would silently allow everything.
"""

import difflib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from service.wire.limits import MAX_SHOWN_CHARS
from service.wire.refusals import path_name

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
"""Of JSON Schema itself. The last three would look as if the text were held to them."""


class BadKeyword(NamedTuple):
    place: str
    """Of the part that has it, as in `properties.name`; empty for the whole schema."""
    keyword: str
    reason: str


def bad_keyword(schema: dict[str, Any]) -> BadKeyword | None:
    """The first keyword that would have no effect. Looks wherever a schema may stand, used or not."""
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
    """The schemas inside of one; names of properties and values of `enum` or `default` are no keywords."""
    for keyword, value in schema.items():
        if keyword in _SCHEMA and isinstance(value, dict):
            yield (*path, keyword), value
        elif keyword in _LIST_OF_SCHEMAS and isinstance(value, list):
            yield from (((*path, keyword, position), entry) for position, entry in enumerate(value))
        elif keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from (((*path, keyword, name), entry) for name, entry in value.items())


def _referred(reference: Any, schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """What a pointer such as `#/x-parts/name` makes a schema; what it misses llguidance tells."""
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
