"""SmolLM2 under grammars: JSON that parses and validates, resumed or not, and what the masks cost."""

from dataclasses import replace
from typing import Any

import jsonschema
import orjson
import pytest

from kernels.loading import load_runner
from kernels.runner import Runner
from kernels.weights.source import ModelSource
from scheduler.plan import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.spec import FinishReason, RequestSpec
from service.grammar import load_grammars
from service.grammar.formats import grammar_of
from service.text.load import load_tokenizer
from service.text.tokenizer import Tokenizer
from service.wire import parse_job
from tests.kernels.needs import real_model
from tests.support.configs import runner_options, scheduler_config

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
SHORT = {"type": "string", "maxLength": 16}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "city": SHORT,
            "inhabitants": {"type": "integer", "minimum": 0},
            "capital": {"type": "boolean"},
        },
        "required": ["city", "inhabitants", "capital"],
        "additionalProperties": False,
    },
    {"type": "array", "items": SHORT, "minItems": 2, "maxItems": 3},
    {
        "type": "object",
        "properties": {
            "date": {"type": "string", "format": "date"},
            "kind": {"enum": ["river", "lake", "sea"]},
        },
        "required": ["date", "kind"],
        "additionalProperties": False,
    },
]
MAX_TOKENS = 96


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return real_model(MODEL)


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return load_tokenizer(source.path)


@pytest.fixture(scope="module")
def runner(tokenizer: Tokenizer) -> Runner:
    runner = load_runner(
        runner_options(
            MODEL, device="cpu", dtype="float32", kv_cache_bytes=1 << 27, max_num_seqs=8, num_threads=1
        )
    )
    grammars = load_grammars(
        tokenizer, tokenizer.eos_token_ids | set(runner.eos_token_ids), runner.vocab_size
    )
    assert grammars is not None
    runner.constrain_with(grammars)
    return runner


def specs(tokenizer: Tokenizer) -> list[tuple[RequestSpec, dict[str, Any]]]:
    made = []
    for number, schema in enumerate(SCHEMAS):
        response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        value = orjson.dumps({"id": "j", "prompt": "x", "response_format": response_format})
        grammar = grammar_of(parse_job(value, key=b"j", timestamp_ms=0).response_format)
        assert grammar is not None
        prompt = tokenizer.encode_chat(
            [{"role": "user", "content": f"Answer in JSON: {orjson.dumps(schema).decode()}"}]
        )
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(seed=number, temperature=temperature, grammar=grammar.text)
            name = f"{number}@{temperature:g}"
            spec = RequestSpec(
                name, tuple(prompt), MAX_TOKENS, sampling, 0.0, stop_token_ids=tokenizer.eos_token_ids
            )
            made.append((spec, schema))
    return made


def run(runner: Runner, wanted: list[RequestSpec]) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
    scheduler = Scheduler(
        scheduler_config(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_num_seqs=8,
            max_model_len=runner.max_model_len,
        )
    )
    tokens = {spec.request_id: list(spec.generated_token_ids) for spec in wanted}
    finishes: dict[str, FinishReason] = {}
    for spec in wanted:
        assert scheduler.add(spec, 0.0) is None
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(runner.step(plan), 0.0)
        for update in scheduler.take_updates():
            tokens[update.request_id].extend(update.new_token_ids)
            if update.finish:
                finishes[update.request_id] = update.finish
    return tokens, finishes


def test_json_schema_output_parses_and_validates_and_a_resumed_one_is_the_same(
    runner: Runner, tokenizer: Tokenizer
) -> None:
    wanted = specs(tokenizer)
    tokens, finishes = run(runner, [spec for spec, _ in wanted])

    assert set(finishes.values()) == {FinishReason.STOP}, finishes
    for spec, schema in wanted:
        jsonschema.validate(orjson.loads(tokenizer.decode(tokens[spec.request_id])), schema)

    resumed = [replace(spec, generated_token_ids=tuple(tokens[spec.request_id][:5])) for spec, _ in wanted]
    assert run(runner, resumed)[0] == tokens
