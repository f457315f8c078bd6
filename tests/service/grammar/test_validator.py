"""No grammar harms more than its own job: bad, endless and huge ones are refused, and the next one is served."""

import asyncio
import gc
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from llguidance import LLMatcher

from kernels.grammar import Grammars
from service.errors import InternalError, JobError
from service.grammar import GrammarLimits, GrammarValidator, load_grammars
from service.grammar import validator as validator_module
from service.grammar.formats import grammar_of
from service.text.tokenizer import ByteTokenizer
from service.wire import Job, parse_job
from service.wire.limits import MAX_ERROR_MESSAGE_BYTES, MAX_SHOWN_CHARS

TOKENIZER = ByteTokenizer()
ENDLESS = {"type": "integer", "multipleOf": 99_999_989}
"""llguidance builds an automaton with that many states and knows no limit for it."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    grammars = load_grammars(TOKENIZER, TOKENIZER.eos_token_ids, TOKENIZER.vocab_size)
    assert grammars is not None
    return grammars


@pytest.fixture
async def validator(grammars: Grammars) -> AsyncIterator[GrammarValidator]:
    validator = GrammarValidator(grammars, GrammarLimits(cpu_s=0.3))
    yield validator
    await validator.close()
    gc.collect()  # a process or pipe that was left open becomes a warning here, which is an error


def job(response_format: dict[str, Any], **fields: Any) -> Job:
    value = {"id": "j", "prompt": "x", "response_format": response_format} | fields
    return parse_job(orjson.dumps(value), key=b"j", timestamp_ms=0)


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "regex": pattern}


def schema(document: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": document}}


def choice(*options: str) -> dict[str, Any]:
    return {"type": "choice", "choice": list(options)}


def accepts(text: str | None, output: str) -> bool:
    """Whether the grammar takes the whole output and may end there."""
    assert text is not None
    grammars = load_grammars(TOKENIZER, TOKENIZER.eos_token_ids, TOKENIZER.vocab_size)
    assert grammars is not None
    matcher = grammars.matcher(text)
    return matcher.consume_tokens(list(output.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("response_format", "good", "bad"),
    [
        (regex(r"\d{2}:[a-f]+"), ["12:abc"], ["12:", "12:x", "a12:a", "12:a "]),
        (regex("^a|b$"), ["a", "b"], ["ab", ""]),
        (
            choice("yes", "yes, but", 'a "b"\n/c\\', "日本 é"),
            ["yes", "yes, but", 'a "b"\n/c\\', "日本 é"],
            ["ye", "no"],
        ),
        (
            {"type": "json_object"},
            ["{}", '{"a": [1, null, {"b": "c"}]}', '{\n  "a": 1\n}'],
            ["[]", "1", "{} ", "{  }"],
        ),
        (
            schema(
                {
                    "type": "object",
                    "properties": {"n": {"type": "integer"}},
                    "required": ["n"],
                    "additionalProperties": False,
                }
            ),
            ['{"n": 1}', '{"n":-20}'],
            ["{}", '{"n": "1"}', '{"n": 1, "m": 2}', '{"n": 1.5}'],
        ),
        (
            schema({"type": "array", "items": {"enum": ["a", 2]}, "minItems": 1}),
            ['["a", 2]', "[2]"],
            ["[]", '["b"]'],
        ),
    ],
)
async def test_each_format_accepts_only_matching_text(
    validator: GrammarValidator, response_format: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    text = await validator.admit(job(response_format))

    assert [output for output in good if not accepts(text, output)] == []
    assert [output for output in bad if accepts(text, output)] == []


async def test_text_needs_no_grammar(validator: GrammarValidator) -> None:
    assert await validator.admit(job({"type": "text"})) is None


REGEX_FIELD, SCHEMA_FIELD = "response_format.regex", "response_format.json_schema.schema"
PRODUCT = [{"anyOf": [{"properties": {f"p{i}": {}}} for i in range(k, k + 6)]} for k in range(0, 60, 6)]
"""6^10 combinations."""

BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "unclosed": (regex("(["), REGEX_FIELD, "unclosed"),
    "look-around": (regex("(?=a)b"), REGEX_FIELD, "look-around"),
    "back-reference": (regex(r"(a)\1"), REGEX_FIELD, "backreferences"),
    "nested": (regex("(" * 2000 + "a" + ")" * 2000), REGEX_FIELD, "nested"),
    "matches nothing": (regex(r"[^\s\S]"), REGEX_FIELD, "no text matches"),
    "impossible": (schema({"type": "integer", "minimum": 5, "maximum": 1}), SCHEMA_FIELD, "minimum"),
    "circular": (schema({"$ref": "#"}), SCHEMA_FIELD, "no text matches"),
    "remote": (schema({"$ref": "http://example.com/x"}), SCHEMA_FIELD, "example.com"),
    "unknown keyword": (schema({"not": {"type": "string"}}), SCHEMA_FIELD, "not"),
    "too large": (schema({"allOf": PRODUCT}), SCHEMA_FIELD, "too large"),
    "too many at once": (
        schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}),
        SCHEMA_FIELD,
        "row has",
    ),
    "endless": (schema(ENDLESS), SCHEMA_FIELD, "processor time"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_regex_or_grammar_is_refused_with_field_value_and_limit(
    validator: GrammarValidator, name: str
) -> None:
    response_format, field, reason = BAD[name]
    with pytest.raises(JobError) as raised:
        await validator.admit(job(response_format))

    error = raised.value
    assert (error.code, error.field, error.job_id) == ("invalid_grammar", field, "j")
    assert re.search(reason, error.message)
    assert error.message.startswith(field)
    assert len(error.message.encode()) <= MAX_ERROR_MESSAGE_BYTES
    assert 0 < len(str(error.value)) <= MAX_SHOWN_CHARS
    assert error.limit
    assert accepts(await validator.admit(job(regex("a+"))), "aa")


OWN_REASONS = {name: case for name, case in BAD.items() if name != "endless"} | {
    "ambiguous oneOf": (schema({"oneOf": [{"const": 1}, {"minimum": 1}]}), SCHEMA_FIELD, "anyOf"),
    "unknown format": (schema({"type": "string", "format": "word"}), SCHEMA_FIELD, "word"),
}


@pytest.mark.parametrize("name", OWN_REASONS)
async def test_a_refused_grammar_gives_its_reason_alone(validator: GrammarValidator, name: str) -> None:
    response_format, _, reason = OWN_REASONS[name]
    with pytest.raises(JobError, match=reason) as raised:
        await validator.admit(job(response_format))
    told = f"{raised.value.message} {raised.value.limit}"
    assert not re.search(r"must be|compiles|MiB|\d s\b|option", told)


async def test_a_grammar_that_costs_too_much_names_the_limit(validator: GrammarValidator) -> None:
    with pytest.raises(JobError, match=r"it must be one that compiles in 0\.3 s and 1024 MiB$") as raised:
        await validator.admit(job(schema(ENDLESS)))
    assert raised.value.limit == "compiles in 0.3 s and 1024 MiB"


async def test_a_grammar_that_never_compiles_costs_its_process_once(validator: GrammarValidator) -> None:
    await validator.admit(job(regex("a+")))
    first = validator._sandbox._process
    assert first is not None
    for _ in range(2):
        with pytest.raises(JobError, match="processor time"):
            await validator.admit(job(schema(ENDLESS)))

    assert first.returncode == -signal.SIGPROF
    assert validator._sandbox._process is None  # the second time the verdict was known


async def test_memory_that_a_grammar_takes_is_not_the_engines(grammars: Grammars) -> None:
    validator = GrammarValidator(grammars, GrammarLimits(cpu_s=60.0, memory_bytes=200 << 20))
    with pytest.raises(JobError, match="ended the process"):
        await validator.admit(job(schema(ENDLESS)))
    assert await validator.admit(job(choice("a")))
    await validator.close()


async def test_jobs_that_wait_for_an_endless_grammar_are_served(validator: GrammarValidator) -> None:
    formats = [
        schema(ENDLESS),
        *(regex(f"a{{{n}}}") for n in range(1, 8)),
        regex("("),
        {"type": "json_object"},
    ]

    results = await asyncio.gather(*(validator.admit(job(form)) for form in formats), return_exceptions=True)

    refused = [isinstance(result, JobError) for result in results]
    assert refused == [True, *[False] * 7, True, False]
    assert all(accepts(results[n], "a" * n) for n in range(1, 8))  # type: ignore[arg-type]


async def test_the_answer_for_a_cancelled_job_is_not_given_to_the_next(validator: GrammarValidator) -> None:
    await validator.admit(job(regex("warm")))
    for turns in range(1, 9):
        cancelled = asyncio.create_task(validator.admit(job(regex(f"({'a' * turns}"))))
        for _ in range(turns):  # so far it gets: from before its turn to waiting for the answer
            await asyncio.sleep(0)
        cancelled.cancel()
        (outcome,) = await asyncio.gather(cancelled, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError | JobError)
        assert accepts(await validator.admit(job(regex(f"b{{{turns}}}"))), "b" * turns)


async def test_a_killed_process_is_started_again(validator: GrammarValidator) -> None:
    await validator.admit(job(regex("a")))
    process = validator._sandbox._process
    assert process is not None
    process.kill()
    await process.wait()

    with pytest.raises(JobError, match="ended the process"):
        await validator.admit(job(regex("ab")))
    assert await validator.admit(job(regex("abc")))


async def test_a_process_that_cannot_start_is_not_the_jobs_fault(
    validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validator_module, "_SANDBOX", validator_module._SANDBOX.with_name("missing.py"))
    with pytest.raises(InternalError):
        await validator.admit(job(regex("a")))
    monkeypatch.undo()
    assert await validator.admit(job(regex("a")))


async def test_options_of_llguidance_in_a_schema_are_not_followed(validator: GrammarValidator) -> None:
    text = await validator.admit(
        job(schema({"type": "object", "x-guidance": {"item_separator": "[#]+", "whitespace_pattern": "x+"}}))
    )

    assert accepts(text, '{"a": 1, "b": 2}')
    assert not accepts(text, '{"a": 1#"b": 2}')
    assert not accepts(text, "{xx}")


async def test_blanks_between_parts_of_json_are_bounded(validator: GrammarValidator) -> None:
    """Otherwise blanks until max_tokens would follow the grammar."""
    text = await validator.admit(job({"type": "json_object"}))
    unbounded = LLMatcher.grammar_from_json_schema({"type": "object"})

    assert accepts(text, "{\n" + " " * 32 + "}")
    assert not accepts(text, "{\n" + " " * 33 + "}")
    assert not accepts(text, "{\n\n}")
    assert accepts(unbounded, "{" + "\n" * 999 + "}")


async def test_ignore_eos_contradicts_a_grammar(validator: GrammarValidator) -> None:
    with pytest.raises(JobError, match="ignore_eos") as raised:
        await validator.admit(job(regex("a"), ignore_eos=True))
    assert raised.value.field == "ignore_eos"
    assert await validator.admit(job({"type": "text"}, ignore_eos=True)) is None


async def test_a_model_without_an_end_serves_only_text() -> None:
    assert load_grammars(TOKENIZER, frozenset(), 257) is None
    validator = GrammarValidator(None)
    with pytest.raises(JobError, match=r"response_format\.type") as raised:
        await validator.admit(job(regex("a")))
    assert (raised.value.code, raised.value.limit) == ("not_supported", "text")
    assert await validator.admit(job({"type": "text"})) is None


async def test_verdicts_are_bounded(grammars: Grammars) -> None:
    validator = GrammarValidator(grammars, GrammarLimits(max_verdicts=3))
    for number in range(6):
        await validator.admit(job(regex(f"a{number}")))
    assert len(validator._verdicts) == 3
    await validator.close()


def test_every_format_of_the_wire_has_a_grammar() -> None:
    forms = [regex("a"), choice("a"), {"type": "json_object"}, schema({"type": "object"})]
    assert all(grammar_of(job(form).response_format) is not None for form in forms)
    assert grammar_of(job({"type": "text"}).response_format) is None
