"""A grammar constrains its own row and does not affect other rows."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from kernels.grammar import Grammars, TokenVocabulary
from kernels.sampling.cpu.sampler import Sampler
from scheduler.plan import RowResult, SamplingParams, ScheduledRow

EOS_IDS = frozenset({0, 2})
WORDS = [f"{first}{second}" for first in "abcdefgh" for second in "0123456789 abcdef"]
TOKENS = [b"", b"", b"", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]
VOCAB_SIZE = len(TOKENS) + 5
MAX_TOKENS = 24
TEMPERATURES = [0.0, 1.0]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TokenVocabulary(TOKENS, EOS_IDS), VOCAB_SIZE)


def make_sampler(grammars: Grammars) -> Sampler:
    sampler = Sampler(VOCAB_SIZE)
    sampler.constrain_with(grammars)
    return sampler


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def row(params: SamplingParams, generated: list[int], *, slot: int = 0) -> ScheduledRow:
    return ScheduledRow(
        request_id=f"r{slot}",
        slot=slot,
        token_ids=(generated[-1] if generated else 70,),
        num_computed_tokens=6 + len(generated),
        block_table=(0,),
        sampling=params,
        num_generated_tokens=len(generated),
        history=((70,), tuple(generated)) if params.needs_history and not generated else None,
    )


def logits_of(step: int, slot: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + slot)
    return torch.randn((1, VOCAB_SIZE), generator=generator) * 4


def run(sampler: Sampler, params: SamplingParams, *, max_tokens: int = MAX_TOKENS) -> list[int]:
    """Token ids up to an end, over random logits."""
    generated: list[int] = []
    while len(generated) < max_tokens and not (generated and generated[-1] in EOS_IDS):
        (result,) = sampler.sample(logits_of(len(generated)), [row(params, generated)])
        assert result.token_id is not None, result
        generated.append(result.token_id)
    return generated


def text_of(generated: list[int]) -> str:
    return b"".join(TOKENS[token_id] for token_id in generated).decode()


# No \d: Python and llguidance count different Unicode versions' digits.
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    "pattern", [r"[a-h]{3,9}", r"(a1|b2|c3 ){1,4}", r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"(é|日)+x{2}", r"a*"]
)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**64 - 1))
def test_ended_text_matches_the_whole_regex(
    grammars: Grammars, pattern: str, temperature: float, seed: int
) -> None:
    params = SamplingParams(seed=seed, temperature=temperature, top_p=0.9, grammar=regex(pattern))

    generated = run(make_sampler(grammars), params)

    if generated[-1] in EOS_IDS:
        assert re.fullmatch(pattern, text_of(generated))
    else:
        assert pattern in (r"(é|日)+x{2}", r"a*")


@pytest.mark.parametrize("temperature", [0.0, 8.0])
def test_nothing_but_an_end_follows_a_complete_text(grammars: Grammars, temperature: float) -> None:
    options = ["a1", "b2 c", "dd"]
    text = LLMatcher.grammar_from_lark("start: " + " | ".join(f'"{option}"' for option in options))
    outputs = {
        text_of(run(make_sampler(grammars), SamplingParams(seed=seed, temperature=temperature, grammar=text)))
        for seed in range(30)
    }

    assert outputs <= set(options)
    assert len(outputs) == (1 if temperature == 0.0 else 3)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_neighbours_of_a_constrained_row_are_bit_equal(grammars: Grammars, data: st.DataObject) -> None:
    plain = [
        SamplingParams(
            seed=data.draw(st.integers(0, 99)),
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
            top_k=data.draw(st.sampled_from([0, 5])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
            num_logprobs=data.draw(st.sampled_from([None, 2])),
        )
        for _ in range(data.draw(st.integers(1, 20)))
    ]
    at = data.draw(st.integers(0, len(plain)))
    constrained = row(
        SamplingParams(seed=1, grammar=regex(data.draw(st.sampled_from(["ab", "([", "x+"])))), [], slot=50
    )
    rows = [row(params, [], slot=slot) for slot, params in enumerate(plain)]
    logits = torch.cat([logits_of(0, slot) for slot in range(len(plain))])
    mixed = torch.cat([logits[:at], logits_of(0, 50), logits[at:]])
    before = mixed.clone()

    expected = make_sampler(grammars).sample(logits, rows)
    results = make_sampler(grammars).sample(mixed, [*rows[:at], constrained, *rows[at:]])

    assert results[:at] + results[at + 1 :] == expected
    torch.testing.assert_close(mixed, before, rtol=0, atol=0)


def test_bad_regex_or_grammar_ends_its_row_alone(grammars: Grammars) -> None:
    sampler = make_sampler(grammars)
    bad, good = SamplingParams(seed=0, grammar=regex("([")), SamplingParams(seed=0, grammar=regex("ab"))
    logits = torch.cat([logits_of(0, slot) for slot in range(3)])

    failed, fine, plain = sampler.sample(
        logits, [row(bad, [], slot=0), row(good, [], slot=1), row(SamplingParams(seed=0), [], slot=2)]
    )

    assert failed.token_id is None
    assert failed.error is not None
    assert "unclosed" in failed.error
    assert fine.token_id is not None
    assert TOKENS[fine.token_id] in (b"a", b"ab")
    assert plain.error is None


def test_a_step_that_is_run_again_gives_the_same_token(grammars: Grammars) -> None:
    params = SamplingParams(seed=3, grammar=regex("[a-h0-9]{20}"))
    sampler, generated = make_sampler(grammars), list[int]()
    for step in range(8):
        attempts = [sampler.sample(logits_of(step), [row(params, generated)])[0] for _ in range(3)]
        assert attempts == [attempts[0]] * 3
        assert attempts[0].token_id is not None
        generated.append(attempts[0].token_id)


@pytest.mark.parametrize("num_before", [1, 3, 6])
def test_resumed_with_history_continues_like_the_undisturbed_run(grammars: Grammars, num_before: int) -> None:
    params = SamplingParams(seed=9, grammar=regex("([a-h][0-9]){8}"), frequency_penalty=0.4)
    undisturbed = run(make_sampler(grammars), params)
    assert undisturbed[-1] in EOS_IDS

    sampler, generated = make_sampler(grammars), undisturbed[:num_before]
    while generated[-1] not in EOS_IDS:
        first = len(generated) == num_before
        resumed = replace(row(params, generated), history=((70,), tuple(generated)) if first else None)
        (result,) = sampler.sample(logits_of(len(generated)), [resumed])
        assert result.token_id is not None
        generated.append(result.token_id)

    assert generated == undisturbed


def test_min_tokens_gives_way_where_only_an_end_may_follow(grammars: Grammars) -> None:
    ends = tuple(EOS_IDS)
    forced = SamplingParams(seed=0, grammar=regex("a1"), banned_token_ids=ends, min_tokens=10)
    free = replace(forced, grammar=regex("a*"), temperature=0.0)

    assert text_of(run(make_sampler(grammars), forced)) == "a1"
    assert len(run(make_sampler(grammars), free, max_tokens=10)) == 10


def test_bias_and_penalties_choose_only_among_what_is_allowed(grammars: Grammars) -> None:
    params = SamplingParams(
        seed=0,
        temperature=0.0,
        grammar=regex("[ab]c"),
        logit_bias=((3 + ord("z"), 100.0), (3 + ord("b"), 90.0)),
    )

    assert text_of(run(make_sampler(grammars), params)) == "bc"


def test_logprobs_are_of_the_models_own_distribution(grammars: Grammars) -> None:
    params = SamplingParams(seed=0, temperature=0.0, grammar=regex("z"), num_logprobs=1)
    (result,) = make_sampler(grammars).sample(logits_of(0), [row(params, [])])

    whole = torch.log_softmax(logits_of(0)[0].double(), dim=0)
    assert result.token_id == 3 + ord("z")
    assert result.logprobs is not None
    assert math.isclose(result.logprobs.logprob, float(whole[result.token_id]), abs_tol=1e-5)
    assert result.logprobs.top[0][0] == int(np.argmax(logits_of(0).numpy()))


def test_without_a_vocabulary_the_row_says_so() -> None:
    (result,) = Sampler(VOCAB_SIZE).sample(
        logits_of(0), [row(SamplingParams(seed=0, grammar=regex("a")), [])]
    )

    assert result == RowResult("r0", error="response_format needs a vocabulary, which was not loaded")
