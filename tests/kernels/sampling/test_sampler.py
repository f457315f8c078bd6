"""The vectorised sampler against the plain one, and its draws against the distribution."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling.cpu.sampler import Sampler
from scheduler.plan import RowResult, SamplingParams
from tests.kernels.sampling import reference
from tests.kernels.sampling.rows import VOCAB_SIZE, make_row, random_logits, token_ids

params_strategy = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 5, 64, 65, 400, VOCAB_SIZE, 5000]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (VOCAB_SIZE - 1, 4.0)), ((0, -100.0), (0, 100.0))]),
    num_logprobs=st.sampled_from([None, 0, 3, 20]),
    banned_token_ids=st.sampled_from([(), (1, 2, VOCAB_SIZE - 1)]),
    min_tokens=st.sampled_from([0, 4]),
)
tokens_strategy = st.lists(st.integers(0, 30), max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(params_strategy, tokens_strategy, tokens_strategy), min_size=1, max_size=40),
    seed=st.integers(0, 1000),
)
def test_every_row_equals_the_plain_sampler(
    requests: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    logits = random_logits(len(requests), seed=seed)
    rows = [
        make_row(params, slot=slot, position=50 + slot, prompt=prompt, generated=generated)
        for slot, (params, prompt, generated) in enumerate(requests)
    ]

    results = Sampler(VOCAB_SIZE).sample(logits, rows)

    for row, result, values, (params, prompt, generated) in zip(
        rows, results, logits.double().tolist(), requests, strict=True
    ):
        assert result.error is None
        adjusted = reference.adjusted(values, params, prompt, generated)
        assert result.token_id in reference.choices(adjusted, params, row.sample_position)
        check_logprobs(result, values, params)


def check_logprobs(result: RowResult, logits: Sequence[float], params: SamplingParams) -> None:
    if params.num_logprobs is None:
        assert result.logprobs is None
        return
    assert result.logprobs is not None
    assert result.token_id is not None
    expected = reference.log_softmax(logits)
    assert result.logprobs.logprob == pytest.approx(expected[result.token_id], abs=1e-4)
    best = sorted(range(len(logits)), key=lambda token_id: -expected[token_id])[: params.num_logprobs]
    assert [token_id for token_id, _ in result.logprobs.top] == best
    assert [value for _, value in result.logprobs.top] == pytest.approx([expected[i] for i in best], abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_frequencies_follow_the_distribution(fields: dict[str, Any]) -> None:
    num_draws, vocab_size = 8_000, 12
    logits = random_logits(1, vocab_size) / 2
    params = SamplingParams(seed=1234, **fields)
    rows = [make_row(params, slot=0, position=position) for position in range(1, num_draws + 1)]

    tokens = token_ids(Sampler(vocab_size).sample(logits.expand(num_draws, -1).contiguous(), rows))

    expected = np.array(reference.distribution(logits[0].double().tolist(), params)) * num_draws
    counts = np.bincount(np.array(tokens), minlength=vocab_size)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 31.3  # 99.9th percentile at 11 degrees of freedom, the most there can be


def test_wide_nucleus_falls_back_to_a_full_sort() -> None:
    """Flat logits: 90 % of the mass needs 90 % of the tokens, far beyond the first candidates."""
    logits = torch.linspace(0, 1e-3, VOCAB_SIZE).unsqueeze(0)
    params = [SamplingParams(seed=seed, top_p=0.9) for seed in range(400)]

    tokens = token_ids(
        Sampler(VOCAB_SIZE).sample(
            logits.expand(400, -1).contiguous(), [make_row(p, slot=slot) for slot, p in enumerate(params)]
        )
    )

    smallest = min(token_id for token_id in tokens if token_id is not None)
    assert 99 <= smallest < 150


def test_no_rows_give_no_results() -> None:
    assert Sampler(VOCAB_SIZE).sample(torch.empty((0, VOCAB_SIZE)), []) == []
