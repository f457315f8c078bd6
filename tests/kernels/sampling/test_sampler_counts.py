"""A slot counts the tokens of its request for penalties, each once, from first to last."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kernels.sampling.cpu.sampler import Sampler
from scheduler.plan import SamplingParams, ScheduledRow
from tests.kernels.sampling.rows import VOCAB_SIZE, make_row, random_logits, token_ids


def following(first: ScheduledRow, tokens: Sequence[int | None]) -> ScheduledRow:
    """The decoding row after these generated tokens; it contains the last one."""
    last = tokens[-1]
    assert last is not None
    return replace(first, history=None, num_generated_tokens=len(tokens), token_ids=(last,))


def sampled(sampler: Sampler, logits: torch.Tensor, first: ScheduledRow, num_steps: int) -> list[int | None]:
    """Tokens of a row and of those that follow it in its slot."""
    known = list(first.history[1]) if first.history else []
    tokens = token_ids(sampler.sample(logits, [first]))
    while len(tokens) < num_steps:
        tokens += token_ids(sampler.sample(logits, [following(first, [*known, *tokens])]))
    return tokens


def test_penalty_counts_follow_the_tokens_sampled_in_the_slot() -> None:
    params = SamplingParams(seed=0, temperature=0.0, frequency_penalty=2.0)
    logits = torch.tensor([[5.0, 4.0, 3.0]])

    tokens = sampled(Sampler(3), logits, make_row(params), 5)

    assert tokens == [0, 1, 0, 2, 1]


def test_hazard_a_step_that_runs_again_does_not_count_its_token_twice() -> None:
    params = SamplingParams(seed=0, temperature=0.0, frequency_penalty=2.0)
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    sampler = Sampler(3)
    first = make_row(params)
    tokens: list[int | None] = []
    for _ in range(5):
        row = following(first, tokens) if tokens else first
        once = token_ids(sampler.sample(logits, [row]))
        assert token_ids(sampler.sample(logits, [row])) == once
        tokens += once

    assert tokens == [0, 1, 0, 2, 1]


def test_released_slot_forgets_its_counts() -> None:
    params = SamplingParams(seed=0, temperature=0.0, presence_penalty=2.0)
    logits = torch.tensor([[5.0, 4.0]])
    sampler = Sampler(2)
    sampler.sample(logits, [make_row(params)])

    sampler.release([0])

    assert token_ids(sampler.sample(logits, [make_row(params)])) == [0]
    with pytest.raises(AssertionError, match="penalties without history"):
        sampler.sample(logits, [replace(make_row(params, slot=1), history=None)])


def test_readmission_with_history_equals_an_undisturbed_run() -> None:
    params = SamplingParams(seed=0, temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.1)
    logits = random_logits(1, 50)
    undisturbed = sampled(Sampler(50), logits, make_row(params, prompt=(1, 2)), 10)

    known = [token_id for token_id in undisturbed[:5] if token_id is not None]
    tokens = sampled(Sampler(50), logits, make_row(params, slot=3, prompt=(1, 2), generated=known), 5)

    assert tokens == undisturbed[5:]


def test_counts_grow_beyond_their_first_capacity() -> None:
    params = SamplingParams(seed=0, temperature=0.0, presence_penalty=100.0)
    logits = random_logits(1)

    tokens = sampled(Sampler(VOCAB_SIZE), logits, make_row(params), 300)

    assert tokens == logits[0].argsort(descending=True)[:300].tolist()
