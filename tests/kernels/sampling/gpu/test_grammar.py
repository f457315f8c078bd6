"""Grammars in the device's sampler: the same masks, the same errors, the same tokens as in the host's."""

from dataclasses import replace

import pytest
import torch
from llguidance import LLMatcher

from kernels.grammar import Grammars, TokenVocabulary
from kernels.runtime.gpu.step_inputs import StepInputs
from kernels.sampling.cpu.sampler import Sampler
from kernels.sampling.gpu.sampler import GpuSampler
from scheduler.plan import SamplingParams, ScheduledRow

CPU = torch.device("cpu")
TOKENS = [b"", b"", *(bytes([byte]) for byte in range(0x20, 0x7F)), b"ab", b"yes"]
VOCAB = len(TOKENS) + 4
EOS = frozenset({0, 1})


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TokenVocabulary(TOKENS, EOS), VOCAB)


def row(slot: int, sampling: SamplingParams, generated: list[int]) -> ScheduledRow:
    history = ((5,), tuple(generated)) if sampling.needs_history and not generated else None
    last = generated[-1] if generated else 5
    return ScheduledRow(
        f"r{slot}", slot, (last,), 9 + len(generated), (0,), sampling, len(generated), history
    )


def test_constrained_rows_beside_plain_ones_equal_the_hosts(grammars: Grammars) -> None:
    text = LLMatcher.grammar_from_regex("(yes|[a-c]{3})")
    ours, theirs = GpuSampler(VOCAB, StepInputs(CPU, 8)), Sampler(VOCAB)
    ours.constrain_with(grammars)
    theirs.constrain_with(grammars)
    sampling = [
        SamplingParams(seed=1, temperature=0.0, grammar=text),
        SamplingParams(seed=2, temperature=0.0),
        SamplingParams(seed=3, grammar=text, banned_token_ids=tuple(EOS), min_tokens=9),
        SamplingParams(seed=4, grammar=LLMatcher.grammar_from_regex("([")),
        SamplingParams(seed=5, grammar=text, frequency_penalty=0.5),
    ]
    generated: list[list[int]] = [[] for _ in sampling]
    for step in range(4):
        live = [
            slot
            for slot in range(len(sampling))
            if not EOS & set(generated[slot]) and (slot != 3 or step == 0)
        ]
        logits = torch.randn(len(live), VOCAB, generator=torch.Generator().manual_seed(step)) * 3
        rows = [row(slot, sampling[slot], generated[slot]) for slot in live]
        results = ours.sample(logits, rows)
        assert results == theirs.sample(logits, rows)
        for slot, result in zip(live, results, strict=True):
            assert (result.error is None) == (slot != 3), result
            generated[slot] += [] if result.token_id is None else [result.token_id]
    for slot in (0, 2, 4):
        assert generated[slot][-1] in EOS
        assert b"".join(TOKENS[token_id] for token_id in generated[slot]).isalpha()


def test_a_masked_row_leaves_its_neighbours_as_they_are(grammars: Grammars) -> None:
    plain = [row(slot, SamplingParams(seed=slot, top_k=5 * slot), []) for slot in range(4)]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(7))
    sampler = GpuSampler(VOCAB, StepInputs(CPU, 8))
    sampler.constrain_with(grammars)
    constrained = replace(row(6, SamplingParams(seed=6, grammar=LLMatcher.grammar_from_regex("b")), []))

    results = sampler.sample(logits, [*plain, constrained])

    assert results[:4] == GpuSampler(VOCAB, StepInputs(CPU, 8)).sample(logits[:4].contiguous(), plain)
    assert results[4].token_id == TOKENS.index(b"b")


def test_bans_leave_a_masks_other_tokens_and_a_mask_of_banned_tokens_alone(grammars: Grammars) -> None:
    """The last word of a mask is not full; a complete text may end although it has fewer than min_tokens."""
    ours = GpuSampler(VOCAB, StepInputs(CPU, 8))
    ours.constrain_with(grammars)
    banned = (TOKENS.index(b"b"), TOKENS.index(b"~"), 10_000)
    sampling = [
        SamplingParams(seed=1, temperature=0.0, grammar=text, banned_token_ids=banned, min_tokens=9)
        for text in (LLMatcher.grammar_from_regex("[b-c~]"), LLMatcher.grammar_from_regex("[b~]"))
    ]
    logits = torch.zeros(2, VOCAB)
    logits[:, banned[1]], logits[:, banned[0]] = 5.0, 4.0
    results = ours.sample(logits, [row(slot, params, []) for slot, params in enumerate(sampling)])
    assert [result.token_id for result in results] == [TOKENS.index(b"c"), banned[1]]
