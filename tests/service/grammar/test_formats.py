"""A keyword of a JSON schema is followed, or refused by name and place; none is ignored."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import JobError
from service.grammar import GrammarValidator, load_grammars
from service.grammar.formats import bad_keyword, grammar_of
from service.text.tokenizer import ByteTokenizer
from tests.service.grammar.test_validator import SCHEMA_FIELD, accepts, job, schema

TYPO = {"type": "string", "maxlength": 2}
PLACES: dict[str, Any] = {
    "": TYPO,
    "properties.a": {"type": "object", "properties": {"a": TYPO}},
    "patternProperties.^a": {"type": "object", "patternProperties": {"^a": TYPO}},
    "additionalProperties": {"type": "object", "additionalProperties": TYPO},
    "items": {"type": "array", "items": TYPO},
    "items[1]": {"type": "array", "items": [True, TYPO]},
    "additionalItems": {"type": "array", "items": [True], "additionalItems": TYPO},
    "prefixItems[0]": {"type": "array", "prefixItems": [TYPO]},
    "anyOf[1]": {"anyOf": [{"type": "null"}, TYPO]},
    "allOf[0]": {"allOf": [TYPO]},
    "oneOf[0]": {"oneOf": [TYPO]},
    "$defs.unused": {"type": "null", "$defs": {"unused": TYPO}},
    "definitions.unused": {"type": "null", "definitions": {"unused": TYPO}},
    "x-parts.a": {"x-parts": {"a": TYPO}, "$ref": "#/x-parts/a"},
    "default": {"default": TYPO, "$ref": "#/default"},
    "properties.a.items.anyOf[0].properties.b": {
        "properties": {"a": {"items": {"anyOf": [{"properties": {"b": TYPO}}]}}}
    },
}  # fmt: skip


def error_of(document: dict[str, Any]) -> JobError:
    with pytest.raises(JobError) as raised:
        grammar_of(job(schema(document)).response_format, "j")
    return raised.value


@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_keyword_is_refused_by_name_in_every_part_of_a_schema(place: str) -> None:
    error = error_of(PLACES[place])
    assert error.field == f"{SCHEMA_FIELD}.{place}".removesuffix(".")
    assert (
        error.message
        == f"{error.field}: 'maxlength' is not a keyword of JSON Schema; did you mean maxLength?"
    )
    assert (error.code, error.value, error.job_id) == ("invalid_grammar", "maxlength", "j")
    assert error.limit


@pytest.mark.parametrize(
    ("keyword", "value", "reason"),
    [
        ("nullable", True, 'write "type": [..., "null"] instead'),
        ("MinLength", 1, "did you mean minLength?"),
        ("requires", ["a"], "did you mean required?"),
        ("propertyOrdering", ["a"], "is not a keyword"),
        ("extends", {"type": "string"}, "is not a keyword"),
        ("contentEncoding", "base64", "is not supported"),
        ("uniqueItems", True, "is not supported"),
        ("if", {"type": "string"}, "is not supported"),
        ("k" * 70, 1, "is not a keyword"),
    ],
)
def test_keyword_without_effect_is_refused(keyword: str, value: Any, reason: str) -> None:
    error = error_of({"type": "object", keyword: value})
    assert error.value == keyword[:64]
    assert repr(error.value) in error.message
    assert reason in error.message


async def test_annotations_and_names_of_properties_are_no_unknown_keywords() -> None:
    tokenizer = ByteTokenizer()
    validator = GrammarValidator(load_grammars(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size))
    described = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "description": "D",
        "default": {"maxlength": 1}, "examples": [{"nullable": 1}], "$comment": "c", "deprecated": True,
        "readOnly": True, "writeOnly": False, "x-order": {"maxlength": 1}, "x-": 1,
    }  # fmt: skip
    document = {
        "type": "object",
        "properties": {
            "nullable": {"type": "integer"} | described,
            "maxlength": {"enum": [{"maxlength": 2}, 1]},
            "if": {"$ref": "#/$defs/not"},
        },
        "required": ["nullable", "if"],
        "additionalProperties": False,
        "$defs": {"not": {"type": "boolean"}},
    } | described
    text = await validator.admit(job(schema(document)))
    assert accepts(text, '{"nullable": 1, "maxlength": {"maxlength": 2}, "if": true}')
    assert not accepts(text, '{"nullable": null, "if": true}')
    await validator.close()


FOLLOWED: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "string", "maxLength": 2}, '"ab"', '"abc"'),
    ({"type": "string", "minLength": 2}, '"ab"', '"a"'),
    ({"type": "string", "pattern": "^a+$"}, '"aa"', '"b"'),
    ({"type": "string", "format": "date"}, '"2030-01-31"', '"soon"'),
    ({"type": "integer", "minimum": 3}, "3", "2"),
    ({"type": "integer", "maximum": 3}, "3", "4"),
    ({"type": "integer", "exclusiveMinimum": 3}, "4", "3"),
    ({"type": "integer", "exclusiveMaximum": 3}, "2", "3"),
    ({"type": "integer", "multipleOf": 3}, "6", "7"),
    ({"type": "array", "minItems": 1}, "[1]", "[]"),
    ({"type": "array", "maxItems": 1}, "[1]", "[1,2]"),
    ({"type": "array", "items": {"type": "null"}}, "[null]", "[1]"),
    ({"type": "array", "prefixItems": [{"type": "null"}]}, "[null]", "[1]"),
    ({"type": "array", "items": [True], "additionalItems": False}, "[1]", "[1,2]"),
    ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":1}'),
    ({"type": "object", "required": ["a"]}, '{"a":1}', "{}"),
    ({"type": "object", "properties": {"a": {"type": "null"}}}, '{"a":null}', '{"a":1}'),
    ({"type": "object", "additionalProperties": {"type": "null"}}, '{"a":null}', '{"a":1}'),
    ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, '{"a":null}', '{"a":1}'),
    ({"enum": [1, 2]}, "1", "3"),
    ({"const": 1}, "1", "2"),
    ({"anyOf": [{"const": 1}, {"const": 2}]}, "2", "3"),
    ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, "2", '"a"'),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "3", "2"),
    ({"$defs": {"a": {"const": 1}}, "$ref": "#/$defs/a"}, "1", "2"),
    ({"definitions": {"a": {"const": 1}}, "$ref": "#/definitions/a"}, "1", "2"),
    ({"$defs": {"a": {"$anchor": "b", "const": 1}}, "$ref": "#b"}, "1", "2"),
]


@pytest.mark.parametrize(("document", "good", "bad"), FOLLOWED)
def test_keywords_that_are_let_through_are_followed(document: dict[str, Any], good: str, bad: str) -> None:
    grammar = grammar_of(job(schema(document)).response_format)
    assert grammar is not None
    assert accepts(grammar.text, good)
    assert not accepts(grammar.text, bad)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["properties", "items", "anyOf", "$defs", "$ref", "a", "type", "nullable"]), inner
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["properties", "items", "anyOf", "$ref", "x-a"]), json_values))
def test_any_json_is_searched_without_an_error(document: dict[str, Any]) -> None:
    bad_keyword(document)


def test_references_in_a_circle_end() -> None:
    assert (
        bad_keyword({"$defs": {"a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#/"}}, "$ref": "#/$defs/a"}) is None
    )
