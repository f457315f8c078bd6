"""Runners under grammars, driven by the real Scheduler: whole outputs follow them, also when preempted or resumed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from kernels.deterministic import EOS_TOKEN_ID, DeterministicRunner
from kernels.grammar import Grammars, TokenVocabulary
from kernels.loading import load_runner
from kernels.runner import Runner
from scheduler.plan import SamplingParams
from scheduler.spec import FinishReason, RequestSpec
from tests.kernels.driving import scheduler_for, updates_of
from tests.kernels.runtime.grammar_cases import BOUNDED, CASES, Tokens, check_outputs, run, specs
from tests.kernels.tiny import SIZES, make_model, save
from tests.support.configs import deterministic_options, runner_options

BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4
"""K and V, layers, KV heads, head size, tokens, float32."""
TINY_TOKENS = [b"", b"", b"", *(bytes([byte]) for byte in range(0x20, 0x7F)), b"\n"]
TINY_TOKENS += [
    pair.encode() for pair in ('{"', '":', '",', '"]', "}", "ab", "ye", "es", "no", "tr", "12", "tags", "may")
]
TINY_EOS = frozenset({0, 2})

Kind = tuple[Callable[[int], Runner], list[bytes], frozenset[int]]


@pytest.fixture(scope="module")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Runner]:
    folder = save(make_model("llama"), tmp_path_factory.mktemp("constrained"))
    grammars = Grammars(TokenVocabulary(TINY_TOKENS, TINY_EOS), SIZES["vocab_size"])

    def load(num_blocks: int) -> Runner:
        options = runner_options(
            str(folder),
            device="cpu",
            dtype="float32",
            kv_cache_bytes=num_blocks * BLOCK_BYTES,
            max_num_seqs=32,
            max_num_batched_tokens=64,
            num_threads=1,
        )
        runner = load_runner(options)
        runner.constrain_with(grammars)
        return runner

    return load


def byte_runner(num_blocks: int) -> Runner:
    runner = DeterministicRunner(deterministic_options(num_blocks=num_blocks, block_size=16))
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
    scheduler = scheduler_for(runner, max_num_seqs=4, num_lookahead_steps=num_lookahead_steps)
    assert scheduler.add(bad, 0.0) is None
    assert scheduler.add(good, 0.0) is None
    finishes = {update.request_id: update.finish for update in updates_of(scheduler, runner) if update.finish}

    assert finishes["bad"] is FinishReason.ERROR
    assert finishes[good.request_id] in (FinishReason.STOP, FinishReason.LENGTH)
    stats = scheduler.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
