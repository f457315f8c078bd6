"""The formats that a job may ask for. Their structure is checked here, their grammars in `service.grammar`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from service.wire import limits
from service.wire.fields import StrictModel, bounded, free_form


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class NamedSchema(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARS)]
    description: Annotated[str, Field(max_length=limits.MAX_REGEX_CHARS)] | None = None
    schema_: Annotated[dict[str, Any], free_form(limits.MAX_SCHEMA_BYTES), Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(StrictModel):
    type: Literal["regex"]
    regex: Annotated[str, Field(min_length=1, max_length=limits.MAX_REGEX_CHARS)]


class ChoiceFormat(StrictModel):
    type: Literal["choice"]
    choice: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=limits.MAX_CHOICE_CHARS)], ...],
        Field(strict=False, min_length=1, max_length=limits.MAX_CHOICE_OPTIONS),
        bounded(limits.MAX_CHOICE_OPTIONS),
    ]


def _plain_type(value: Any) -> Any:
    """Put its name in place of a type that is a list or an object: pydantic would write it out, at any depth."""
    if isinstance(value, dict) and isinstance(value.get("type"), (list, dict)):
        return {**value, "type": type(value["type"]).__name__}
    return value


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat,
    Field(discriminator="type"),
    BeforeValidator(_plain_type),
]
FORMAT_TYPES = ("text", "json_object", "json_schema", "regex", "choice")
