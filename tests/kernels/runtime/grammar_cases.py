"""Grammars of every kind with checks of their outputs, and requests that use them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import orjson

from kernels.runner import Runner
from scheduler.plan import SamplingParams
from scheduler.spec import FinishReason, RequestSpec
from service.grammar.formats import grammar_of
from service.wire import parse_job
from tests.kernels.driving import scheduler_for, updates_of

MAX_NUM_SEQS = 6
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": -5, "maximum": 120}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["a", "bc", 3, None]}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[a-c]{2,6}$"},
    {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3}},
        "required": ["tags"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "integer", "maximum": 999, "minimum": 0}, {"const": {"x": [1]}}]},
]
CHOICES = ["yes", "no", "maybe not"]
PATTERN = r"\d{2}-[a-f]{3,8}"

Check = Callable[[str], None]
Tokens = dict[str, list[int]]


def grammar(response_format: dict[str, Any]) -> str:
    value = orjson.dumps({"id": "j", "prompt": "x", "response_format": response_format})
    made = grammar_of(parse_job(value, key=b"j", timestamp_ms=0).response_format)
    assert made is not None
    return made.text


def check_schema(schema: dict[str, Any]) -> Check:
    return lambda text: jsonschema.validate(orjson.loads(text), schema)


def check_choice(text: str) -> None:
    assert text in CHOICES


def check_regex(text: str) -> None:
    assert re.fullmatch(PATTERN, text)


CASES: list[tuple[str, Check]] = [
    *(
        (
            grammar({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}),
            check_schema(schema),
        )
        for schema in SCHEMAS
    ),
    (grammar({"type": "choice", "choice": CHOICES}), check_choice),
    (grammar({"type": "regex", "regex": PATTERN}), check_regex),
]
BOUNDED = [text for text, check in CASES if check in (check_choice, check_regex)]
"""Grammars whose texts are short."""


def specs(
    max_tokens: int, eos_token_ids: frozenset[int], *, seed: int = 0
) -> dict[str, tuple[RequestSpec, Check]]:
    """Each case once greedy and once at temperature 1, and as many requests without a grammar."""
    made = {}
    for number, (text, check) in enumerate(CASES):
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(seed=seed + number, temperature=temperature, grammar=text)
            request_id = f"{number}@{temperature:g}"
            spec = RequestSpec(
                request_id,
                tuple(range(40, 51 + 5 * number)),
                max_tokens,
                sampling,
                0.0,
                stop_token_ids=eos_token_ids,
            )
            made[request_id] = spec, check
            plain = replace(
                spec,
                request_id=f"plain {request_id}",
                sampling=replace(sampling, grammar=None),
                max_tokens=20,
            )
            made[plain.request_id] = replace(plain, stop_token_ids=frozenset()), lambda text: None
    return made


def run(
    runner: Runner,
    wanted: list[RequestSpec],
    *,
    max_num_seqs: int = MAX_NUM_SEQS,
    num_lookahead_steps: int = 0,
) -> tuple[Tokens, int]:
    """Tokens by request, and how often one was preempted. Everything must end by a stop or by its length."""
    scheduler = scheduler_for(
        runner,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        num_lookahead_steps=num_lookahead_steps,
    )
    tokens: dict[str, list[int]] = {spec.request_id: list(spec.generated_token_ids) for spec in wanted}
    for spec in wanted:
        assert scheduler.add(spec, 0.0) is None
    for update in updates_of(scheduler, runner):
        tokens[update.request_id].extend(update.new_token_ids)
        assert update.finish in (None, FinishReason.STOP, FinishReason.LENGTH), update
    return tokens, scheduler.stats().num_preemptions


def check_outputs(
    tokens: Mapping[str, list[int]],
    wanted: Mapping[str, tuple[RequestSpec, Check]],
    token_bytes: list[bytes],
    eos_token_ids: frozenset[int],
) -> None:
    num_whole = 0
    for request_id, (spec, check) in wanted.items():
        generated = tokens[request_id]
        if spec.sampling.grammar is None or generated[-1] not in eos_token_ids:
            continue
        num_whole += 1
        assert not eos_token_ids & set(generated[:-1])
        check(b"".join(token_bytes[token_id] for token_id in generated).decode())
    assert num_whole >= len(CASES), "too few outputs came to their end to say anything"
