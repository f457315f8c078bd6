"""Runners under grammars, driven by the real Scheduler: whole outputs follow them, preempted or resumed or not."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import orjson
import pytest
from llguidance import LLMatcher

from kernels.deterministic import EOS_TOKEN_ID, DeterministicOptions, DeterministicRunner
from kernels.grammar import Grammars, TokenVocabulary
from kernels.model_loading import load_model_runner
from kernels.registry import resolve_model
from kernels.runner import Runner, RunnerOptions
from scheduler.config import SchedulerConfig
from scheduler.plan import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.spec import FinishReason, RequestSpec
from service.grammar.formats import grammar_of
from service.wire import parse_job
from tests.kernels.driving import updates_of
from tests.kernels.tiny import SIZES, make_model, save

MAX_NUM_SEQS = 6
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4
"""K and V, layers, KV heads, head size, tokens, float32."""
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
"""Texts of these are short."""


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


Tokens = dict[str, list[int]]


def run(
    runner: Runner,
    wanted: list[RequestSpec],
    *,
    max_num_seqs: int = MAX_NUM_SEQS,
    num_lookahead_steps: int = 0,
) -> tuple[Tokens, int]:
    """Tokens by request, and how often one was preempted. Everything must end by a stop or by its length."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=runner.max_model_len,
            max_num_batched_tokens=64,
            num_lookahead_steps=num_lookahead_steps,
        )
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


TINY_TOKENS = [b"", b"", b"", *(bytes([byte]) for byte in range(0x20, 0x7F)), b"\n"]
TINY_TOKENS += [
    pair.encode() for pair in ('{"', '":', '",', '"]', "}", "ab", "ye", "es", "no", "tr", "12", "tags", "may")
]
TINY_EOS = frozenset({0, 2})


@pytest.fixture(scope="module")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Runner]:
    folder = save(make_model("llama"), tmp_path_factory.mktemp("constrained"))
    grammars = Grammars(TokenVocabulary(TINY_TOKENS, TINY_EOS), SIZES["vocab_size"])

    def load(num_blocks: int) -> Runner:
        options = RunnerOptions(
            str(folder),
            device="cpu",
            dtype="float32",
            kv_cache_bytes=num_blocks * BLOCK_BYTES,
            max_num_seqs=32,
            max_num_batched_tokens=64,
            num_threads=1,
        )
        runner = load_model_runner(options, resolve_model(options.model))
        runner.constrain_with(grammars)
        return runner

    return load


def byte_runner(num_blocks: int) -> Runner:
    runner = DeterministicRunner(DeterministicOptions(num_blocks=num_blocks, block_size=16))
    runner.constrain_with(
        Grammars(TokenVocabulary([bytes([byte]) for byte in range(256)], frozenset({EOS_TOKEN_ID})), 257)
    )
    return runner


@pytest.fixture(params=["tiny", "deterministic"])
def kind(
    request: pytest.FixtureRequest, load_tiny: Callable[[int], Runner]
) -> tuple[Callable[[int], Runner], list[bytes], frozenset[int]]:
    if request.param == "tiny":
        return load_tiny, [*TINY_TOKENS, *[b""] * SIZES["vocab_size"]], TINY_EOS
    return byte_runner, [*(bytes([byte]) for byte in range(256)), b""], frozenset({EOS_TOKEN_ID})


Kind = tuple[Callable[[int], Runner], list[bytes], frozenset[int]]


@pytest.mark.parametrize("seed", [0, 100])
def test_ended_outputs_follow_their_grammar(kind: Kind, seed: int) -> None:
    load, token_bytes, eos = kind
    wanted = specs(120, eos, seed=seed)

    tokens, _ = run(load(256), [spec for spec, _ in wanted.values()])

    check_outputs(tokens, wanted, token_bytes, eos)


@pytest.mark.parametrize("num_lookahead_steps", [0, 1])
def test_preempted_outputs_equal_undisturbed_ones(kind: Kind, num_lookahead_steps: int) -> None:
    load, token_bytes, eos = kind
    wanted = specs(60, eos)

    all_specs = [spec for spec, _ in wanted.values()]
    squeezed, num_preemptions = run(load(12), all_specs, num_lookahead_steps=num_lookahead_steps)
    roomy = load(256)
    alone: Tokens = {}
    for spec, _ in wanted.values():
        alone |= run(roomy, [spec])[0]

    assert num_preemptions > 0
    assert squeezed == alone
    check_outputs(squeezed, wanted, token_bytes, eos)


def test_a_redelivered_request_continues_as_if_nothing_had_happened(kind: Kind) -> None:
    load, _, eos = kind
    wanted = {key: pair for key, pair in specs(60, eos).items() if not key.startswith("plain")}
    runner = load(256)
    undisturbed, _ = run(runner, [spec for spec, _ in wanted.values()])
    for num_before in (1, 4):
        resumed = [
            replace(spec, generated_token_ids=tuple(undisturbed[request_id][:num_before]))
            for request_id, (spec, _) in wanted.items()
            if len(undisturbed[request_id]) > num_before
        ]
        tokens, _ = run(load(256), resumed)
        assert tokens == {spec.request_id: undisturbed[spec.request_id] for spec in resumed}


def test_neighbours_of_constrained_rows_are_what_they_are_without_them(kind: Kind) -> None:
    load, _, eos = kind
    wanted = specs(60, eos)
    plain = [spec for request_id, (spec, _) in wanted.items() if request_id.startswith("plain")]

    mixed, _ = run(load(256), [spec for spec, _ in wanted.values()], max_num_seqs=28)
    without, _ = run(load(256), plain, max_num_seqs=28)

    assert {spec.request_id: mixed[spec.request_id] for spec in plain} == without


@pytest.mark.parametrize("num_lookahead_steps", [0, 1])
def test_a_complete_text_ends_although_more_tokens_were_wished_for(
    kind: Kind, num_lookahead_steps: int
) -> None:
    load, token_bytes, eos = kind
    wanted = {key: pair for key, pair in specs(60, eos).items() if pair[0].sampling.grammar in BOUNDED}
    wished = [
        replace(spec, sampling=replace(spec.sampling, banned_token_ids=tuple(sorted(eos)), min_tokens=50))
        for spec, _ in wanted.values()
    ]

    tokens, _ = run(load(256), wished, num_lookahead_steps=num_lookahead_steps)

    assert len(wished) == 2 * len(BOUNDED)
    for request_id, (_, check) in wanted.items():
        *text, end = tokens[request_id]
        assert end in eos
        assert len(text) < 50
        check(b"".join(token_bytes[token_id] for token_id in text).decode())


@pytest.mark.parametrize("num_lookahead_steps", [0, 1])
def test_a_grammar_that_comes_to_its_end_is_compiled_once(
    kind: Kind, num_lookahead_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, _, eos = kind
    text, _ = CASES[-2]
    compiled: list[str] = []
    compile_text = Grammars._compile

    def count(self: Grammars, text: str) -> LLMatcher:
        compiled.append(text)
        return compile_text(self, text)

    spec = RequestSpec(
        "", (40, 41), 20, SamplingParams(seed=1, temperature=0.0, grammar=text), 0.0, stop_token_ids=eos
    )
    runner = load(256)
    run(runner, [replace(spec, request_id="first")])
    monkeypatch.setattr(Grammars, "_compile", count)
    tokens, _ = run(
        runner,
        [replace(spec, request_id=f"r{i}") for i in range(8)],
        max_num_seqs=2,
        num_lookahead_steps=num_lookahead_steps,
    )
    assert all(ids[-1] in eos for ids in tokens.values())
    assert compiled == []


@pytest.mark.parametrize("num_lookahead_steps", [0, 1])
def test_bad_regex_or_grammar_ends_one_request_and_no_other(kind: Kind, num_lookahead_steps: int) -> None:
    load, _, eos = kind
    bad = RequestSpec("bad", (40, 41), 9, SamplingParams(seed=0, grammar="{}"), 0.0, stop_token_ids=eos)
    good = next(iter(specs(9, eos).values()))[0]
    runner = load(64)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=64,
            block_size=16,
            max_num_seqs=4,
            max_model_len=256,
            num_lookahead_steps=num_lookahead_steps,
        )
    )
    assert scheduler.add(bad, 0.0) is None
    assert scheduler.add(good, 0.0) is None
    finishes = {update.request_id: update.finish for update in updates_of(scheduler, runner) if update.finish}

    assert finishes["bad"] is FinishReason.ERROR
    assert finishes[good.request_id] in (FinishReason.STOP, FinishReason.LENGTH)
    stats = scheduler.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
