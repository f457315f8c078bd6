"""Field types of a job: what each accepts, and what it says when it refuses a value."""

import re
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from service.wire import limits
from service.wire.openai_fields import EMPTY, is_empty


class StrictModel(BaseModel):
    """A part of a message: exact types, no unknown fields, immutable. A field that is null counts as not given."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    empty_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that this service does not support but accepts while they are empty."""

    @model_validator(mode="before")
    @classmethod
    def _given_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > limits.MAX_FIELDS:
            reason = f"{len(value)} fields is above the limit {limits.MAX_FIELDS}"
            raise refusal(reason, limit=limits.MAX_FIELDS, field="value", value=len(value))
        fields = cls.model_fields
        required = {field.alias or name for name, field in fields.items() if field.is_required()}
        return {
            name: part for name, part in value.items() if name in required or not cls._is_absent(name, part)
        }

    @classmethod
    def _is_absent(cls, name: str, value: Any) -> bool:
        return value is None or (name in cls.empty_fields and is_empty(value))

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Let every optional field be null, and every unknown one too."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        required = schema.get("required", ())
        optional = {
            name: nullable(part) for name, part in schema["properties"].items() if name not in required
        }
        schema["properties"] |= optional
        for name in sorted(cls.empty_fields):
            schema["properties"].setdefault(name, {"enum": list(EMPTY)})
        schema["additionalProperties"] = {"type": "null"}
        return schema


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that also takes null; what describes the field stays outside."""
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    outside: dict[str, Any] = {
        name: schema[name] for name in ("title", "description", "default") if name in schema
    }
    inside = {name: part for name, part in schema.items() if name not in outside}
    choices = inside["anyOf"] if inside.keys() == {"anyOf"} else [inside]
    return {"anyOf": [*choices, {"type": "null"}], **outside}


def refusal(
    reason: str, *, limit: str | int | float, field: str | None = None, value: str | int | None = None
) -> PydanticCustomError:
    """Make a refusal with our own message, in which `reason` follows "field: ".

    `field` and `value` are for checks of several fields together, where pydantic knows neither.
    """
    # The reason may hold the user's braces, so it is a value and not the template.
    return PydanticCustomError(
        "tailrace", "{reason}", {"reason": reason, "limit": limit, "field": field, "value": value}
    )


def bounded(max_entries: int) -> BeforeValidator:
    """Refuse a long list or object by its length, before any entry is checked."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, tuple, dict)) and len(value) > max_entries:
            raise refusal(f"{len(value)} entries is above the limit {max_entries}", limit=max_entries)
        return value

    return BeforeValidator(check)


def depth_exceeds(value: Any, max_depth: int) -> bool:
    """Tell whether arrays and objects nest deeper than `max_depth`. Does not recurse, so any depth is safe."""
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, (dict, list)):
            if depth > max_depth:
                return True
            children = item.values() if isinstance(item, dict) else item
            stack.extend((child, depth + 1) for child in children)
    return False


def free_form(max_bytes: int) -> AfterValidator:
    """Bound a free-form object by its nesting and its size as JSON."""

    def check(value: dict[str, Any]) -> dict[str, Any]:
        if depth_exceeds(value, limits.MAX_DEPTH):
            raise refusal(f"nesting is deeper than the limit {limits.MAX_DEPTH}", limit=limits.MAX_DEPTH)
        try:
            size = len(orjson.dumps(value))
        except TypeError as error:
            raise refusal(f"is not JSON: {error}", limit="JSON with integers of 64 bits") from None
        if size > max_bytes:
            raise refusal(f"{size} bytes is above the limit {max_bytes}", limit=max_bytes)
        return value

    return AfterValidator(check)


def _int_like(key: str) -> str:
    if int(key) > limits.MAX_TOKEN_ID:
        raise refusal(f"{key} is above the limit {limits.MAX_TOKEN_ID}", limit=limits.MAX_TOKEN_ID)
    return key


def _disabled_as_zero(value: int) -> int:
    return max(value, 0)


def _shown(value: float) -> str:
    # Python's reader yields integers of any length, and `str` refuses those of more than 4,300 digits.
    return str(value) if abs(value) < 1e24 else "a number beyond 1e24"


def _stop_entry(entry: Any) -> str | int:
    if isinstance(entry, str):
        if not entry:
            raise refusal("a stop string is empty; it needs at least 1 character", limit=1)
        if len(entry) > limits.MAX_STOP_CHARS:
            reason = f"a stop string of {len(entry)} characters is above the limit {limits.MAX_STOP_CHARS}"
            raise refusal(reason, limit=limits.MAX_STOP_CHARS)
        return entry
    if isinstance(entry, int) and not isinstance(entry, bool):
        if not 0 <= entry <= limits.MAX_TOKEN_ID:
            reason = f"token id {_shown(entry)} is outside 0 to {limits.MAX_TOKEN_ID}"
            raise refusal(reason, limit=limits.MAX_TOKEN_ID)
        return entry
    raise refusal(f"{type(entry).__name__} is neither a string nor a token id", limit="strings or token ids")


def _stop(value: Any) -> tuple[str | int, ...]:
    if value is None:
        return ()
    entries = value if isinstance(value, (list, tuple)) else [value]
    if len(entries) > limits.MAX_STOPS:
        raise refusal(f"{len(entries)} entries is above the limit {limits.MAX_STOPS}", limit=limits.MAX_STOPS)
    return tuple(_stop_entry(entry) for entry in entries)


_RFC_3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})", re.ASCII)


def parse_rfc3339(text: str) -> datetime | None:
    """Parse an RFC 3339 date-time with an offset; None for anything else."""
    if not _RFC_3339.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text.upper())
    except ValueError:
        return None


def _deadline(value: Any) -> Any:
    if value is None:
        return value
    if isinstance(value, str):
        if parse_rfc3339(value) is None:
            shown = value[: limits.MAX_SHOWN_CHARS]
            reason = f"{shown!r} is not an RFC 3339 time with an offset, as in 2030-01-31T12:00:00Z"
            raise refusal(reason, limit="RFC 3339 or seconds")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refusal(
            f"{type(value).__name__} is neither an RFC 3339 time nor a number of seconds",
            limit="RFC 3339 or seconds",
        )
    if not 0 < value <= limits.MAX_DEADLINE_S:
        reason = f"{_shown(value)} seconds is outside 0 (exclusive) to {limits.MAX_DEADLINE_S:.0f}"
        raise refusal(reason, limit=limits.MAX_DEADLINE_S)
    return float(value)


class TextPart(StrictModel):
    """A text part in OpenAI's list form of `content`."""

    type: Literal["text"]
    text: str


class RefusalPart(StrictModel):
    """The text with which OpenAI's assistant refused to answer; it is treated like any other text."""

    type: Literal["refusal"]
    refusal: str


def _joined_parts(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        reason = f"{type(value).__name__} is neither a string nor a list of text parts"
        raise refusal(reason, limit="string or text parts")
    if len(value) > limits.MAX_CONTENT_PARTS:
        reason = f"{len(value)} parts is above the limit {limits.MAX_CONTENT_PARTS}"
        raise refusal(reason, limit=limits.MAX_CONTENT_PARTS)
    return "\n".join(map(_text_of_part, value))


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind not in ("text", "refusal"):
        # Of anything but a string only the type: Python cannot write a list of a thousand levels.
        shown = kind[: limits.MAX_SHOWN_CHARS] if isinstance(kind, str) else type(kind).__name__
        raise refusal(f"part of type {shown!r} is not supported; only text is", limit="text")
    given = {name for name, value in part.items() if value is not None}
    if given != {"type", kind} or not isinstance(part[kind], str):
        raise refusal(f'a {kind} part is {{"type": "{kind}", "{kind}": string}}', limit=f"type, {kind}")
    text: str = part[kind]
    return text


def number(*, ge: float | None = None, gt: float | None = None, le: float) -> Any:
    """Constrain a field to finite numbers in a range."""
    return Field(ge=ge, gt=gt, le=le, allow_inf_nan=False)


Id = Annotated[str, Field(pattern=limits.ID_PATTERN, max_length=limits.MAX_ID_CHARS)]
_Parts = Annotated[
    list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
    Field(max_length=limits.MAX_CONTENT_PARTS),
]
CustomId = Annotated[str, Field(min_length=1, max_length=limits.MAX_CUSTOM_ID_CHARS)]
Content = Annotated[str, BeforeValidator(_joined_parts, json_schema_input_type=str | _Parts)]
TokenId = Annotated[int, Field(ge=0, le=limits.MAX_TOKEN_ID)]
PromptTokenIds = Annotated[
    tuple[TokenId, ...],
    Field(strict=False, fail_fast=True, min_length=1, max_length=limits.MAX_PROMPT_TOKENS),
    bounded(limits.MAX_PROMPT_TOKENS),
]
TopK = Annotated[int, Field(ge=-1, le=limits.MAX_TOP_K), AfterValidator(_disabled_as_zero)]
Probability = Annotated[float, number(ge=0, le=1)]
Penalty = Annotated[float, number(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
_StopEntry = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARS)] | TokenId
Stop = Annotated[
    tuple[str | int, ...],
    BeforeValidator(
        _stop,
        json_schema_input_type=_StopEntry
        | Annotated[list[_StopEntry], Field(max_length=limits.MAX_STOPS)]
        | None,
    ),
]
Deadline = Annotated[
    float | str,
    BeforeValidator(
        _deadline,
        json_schema_input_type=Annotated[float, Field(gt=0, le=limits.MAX_DEADLINE_S)]
        | Annotated[
            str, Field(json_schema_extra={"format": "date-time", "pattern": f"^{_RFC_3339.pattern}$"})
        ],
    ),
]
LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$"), AfterValidator(_int_like)],
        Annotated[float, number(ge=-limits.MAX_LOGIT_BIAS, le=limits.MAX_LOGIT_BIAS)],
    ],
    Field(max_length=limits.MAX_LOGIT_BIAS_ENTRIES, json_schema_extra={"additionalProperties": False}),
    bounded(limits.MAX_LOGIT_BIAS_ENTRIES),
]
TargetMs = Annotated[float, number(gt=0, le=limits.MAX_TARGET_MS)]
Metadata = Annotated[dict[str, Any], free_form(limits.MAX_METADATA_BYTES)]
