"""Turns pydantic's errors into one sentence that names field, value and limit."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from service.errors import JobError
from service.wire import limits, openai_fields
from service.wire.response_format import FORMAT_TYPES

# An error never repeats users' text: values of these fields are described by type and size alone.
_PRIVATE_FIELDS = frozenset({"messages", "prompt", "content", "text"})

_TYPE_NAMES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "a 64-bit integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def describe(value: Any, *, private: bool = False) -> str | int | float:
    """Describe a value so that a message may repeat it; with `private`, by type and size alone."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, int):
        # An error becomes part of a result, so JSON must be able to write the value.
        shown = value if -(1 << 63) <= value < 1 << 64 else f"an integer of {value.bit_length()} bits"
        return "an integer" if private else shown
    if isinstance(value, float):
        return "a number" if private else value
    if isinstance(value, str):
        if private or len(value) > limits.MAX_SHOWN_CHARS:
            return f"a string of {len(value)} characters"
        return repr(value)
    kind = "an object" if isinstance(value, Mapping) else "a list"
    return f"{kind} of {len(value)} entries"


def shown_name(name: str) -> str:
    """Return a field's name so that a message may repeat it and JSON can write it: half a surrogate pair is text for
    Python, and the empty name is one for JSON."""
    name = name[: limits.MAX_SHOWN_CHARS]
    return name.encode("utf-8", errors="replace").decode() or '""'


def field_name(location: Iterable[int | str], *, unknown: bool = False) -> str:
    """Return the path of a refused field, without what pydantic adds to it: the response format's tag, and a mark
    behind a name that is wrong itself. An `unknown` field may be called like this mark."""
    parts = list(location)
    if parts and parts[-1] == "[key]" and not unknown:
        del parts[-1]
    if len(parts) > 1 and parts[0] == "response_format" and parts[1] in FORMAT_TYPES:
        del parts[1]
    return path_name(parts)


def path_name(path: Iterable[int | str]) -> str:
    """Return `messages[0].role` for ("messages", 0, "role")."""
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{shown_name(part)}" if name else shown_name(part)
    return name if len(name) <= limits.MAX_ID_CHARS else name[: limits.MAX_ID_CHARS] + "…"


def unknown_field(field: str, known: Iterable[str]) -> tuple[str, str]:
    """Return reason and limit for a field that is not accepted."""
    leaf = field.rsplit(".", 1)[-1]
    unserved = openai_fields.REPLY_FIELDS if "messages" in field else openai_fields.REQUEST_FIELDS
    if leaf in unserved and leaf not in known:
        return "not supported; it may only be null or empty", "null or empty"
    near = difflib.get_close_matches(leaf[:64], list(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown field{hint}", "known fields only"


def _outside(word: str, key: str) -> Callable[[Any, Mapping[str, Any]], tuple[str, Any]]:
    def explain(shown: Any, context: Mapping[str, Any]) -> tuple[str, Any]:
        limit = context[key]
        limit = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        exclusive = " (which is itself excluded)" if key in ("gt", "lt") else ""
        return f"{shown} is {word} the limit {limit}{exclusive}", limit

    return explain


_EXPLAIN: Mapping[str, Callable[[Any, Mapping[str, Any]], tuple[str, Any]]] = {
    "greater_than": _outside("not above", "gt"),
    "greater_than_equal": _outside("below", "ge"),
    "less_than": _outside("not below", "lt"),
    "less_than_equal": _outside("above", "le"),
    "finite_number": lambda shown, _: (f"{shown} is not a finite number", "finite numbers"),
    "literal_error": lambda shown, ctx: (f"{shown} is not one of {ctx['expected']}", ctx["expected"]),
    "union_tag_invalid": lambda _, ctx: (
        f"{str(ctx['tag'])[: limits.MAX_SHOWN_CHARS]!r} is not one of {ctx['expected_tags']}",
        ctx["expected_tags"],
    ),
    "union_tag_not_found": lambda _, __: (
        f"missing; it is one of {', '.join(FORMAT_TYPES)}",
        ", ".join(FORMAT_TYPES),
    ),
    "string_too_long": lambda shown, ctx: (
        f"{shown} is above the limit {ctx['max_length']}",
        ctx["max_length"],
    ),
    "string_too_short": lambda _, ctx: (f"empty; at least {ctx['min_length']} character", ctx["min_length"]),
    "too_long": lambda _, ctx: (
        f"{ctx['actual_length']} entries is above the limit {ctx['max_length']}",
        ctx["max_length"],
    ),
    "too_short": lambda _, ctx: (f"empty; at least {ctx['min_length']} entry", ctx["min_length"]),
    "string_pattern_mismatch": lambda shown, ctx: (
        f"{shown} does not match {ctx['pattern']}",
        ctx["pattern"],
    ),
    "string_unicode": lambda shown, _: (f"{shown} holds half a surrogate pair", "Unicode"),
    "missing": lambda _, __: ("missing; it is required", "required"),
    "tailrace": lambda _, ctx: (ctx["reason"], ctx["limit"]),
}


def job_error(error: ValidationError, *, known: Iterable[str], job_id: str | None) -> JobError:
    """Return the first error of a validation as the error that ends the job."""
    detail = error.errors(include_url=False)[0]
    kind, location, context = detail["type"], detail["loc"], detail.get("ctx", {})
    field = field_name(location, unknown=kind == "extra_forbidden")
    field += ".type" if kind.startswith("union_tag_") else ""
    in_private = "role" not in location and not _PRIVATE_FIELDS.isdisjoint(location)
    private = kind == "extra_forbidden" or in_private
    shown = "missing" if kind == "missing" else describe(detail["input"], private=private)
    code = "invalid_value"
    if kind == "extra_forbidden":
        code = "unknown_field"
        reason, limit = unknown_field(field, known)
    elif kind in _EXPLAIN:
        code = "missing_field" if kind == "missing" else code
        reason, limit = _EXPLAIN[kind](shown, context)
    elif kind in _TYPE_NAMES:
        limit = _TYPE_NAMES[kind]
        if limit == "an integer" and isinstance(shown, float) and abs(shown) >= 2**63:
            limit = "a 64-bit integer"
        reason = f"{shown} is not {limit}"
    else:
        reason, limit = f"{shown}: {detail['msg']}", kind
    if not field and kind == "tailrace":
        field, shown = context["field"], context["value"]
    field = field or "value"
    message = f"{field}: {reason}"
    return JobError(code, message, field=field, value=shown, limit=limit, job_id=job_id)
