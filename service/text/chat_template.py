"""Renders chat templates: Jinja, with the settings and names that the authors of models expect."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.errors import JobError, SettingsError

ChatMessages = Sequence[Mapping[str, str]]


class _GenerationTag(Extension):
    """Passes on the text inside `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - the class attribute Jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class ChatTemplate:
    """Renders a model's chat template in Jinja's sandbox. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template. Raises SettingsError when it is not valid Jinja.

        `special_tokens` holds the names a template may use, such as `bos_token`.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise SettingsError(f"model: its chat template cannot be read: {error}") from None

    def render(self, messages: ChatMessages, *, timestamp_ms: int | None = None) -> str:
        """Return the prompt's text up to where the assistant begins. Raises JobError when the template refuses.

        Templates that print today's date get the date of the record, `timestamp_ms`, so that a redelivered
        job has the same prompt. Without it `strftime_now` is undefined, which templates test for.
        """
        names: dict[str, Any] = dict(self._special_tokens)
        if timestamp_ms is not None:
            moment = datetime.fromtimestamp(timestamp_ms / 1000, tz=UTC)
            names["strftime_now"] = moment.strftime
        turns = [dict(message) for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **names)
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, ArithmeticError) as error:
            roles = ", ".join(message.get("role", "?") for message in messages[:8])
            raise JobError(
                "invalid_value", f"messages: the model's chat template refuses the roles {roles}: {error}",
                field="messages", value=roles, limit="the model's chat template",
            ) from None  # fmt: skip
