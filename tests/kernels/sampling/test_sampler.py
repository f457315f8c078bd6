"""The vectorised sampler against the plain one, and what one row may do to another: nothing."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import Sampler
from scheduler.plan import RowResult, SamplingParams, ScheduledRow
from tests.kernels.sampling import reference

VOCAB_SIZE = 1000
GREEDY = SamplingParams(seed=0, temperature=0.0)


def make_row(
    params: SamplingParams,
    *,
    seat: int = 0,
    position: int = 9,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> ScheduledRow:
    return ScheduledRow(
        request_id=f"r{seat}",
        seat=seat,
        token_ids=(0,),
        num_computed_tokens=position - 1,
        block_table=(0,),
        sampling=params,
        num_generated_tokens=len(generated),
        history=(tuple(prompt), tuple(generated)) if params.needs_history else None,
    )


def following(first: ScheduledRow, tokens: Sequence[int | None]) -> ScheduledRow:
    """The decoding row after these generated tokens: it brings the last one along."""
    last = tokens[-1]
    assert last is not None
    return replace(first, history=None, num_generated_tokens=len(tokens), token_ids=(last,))


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3


def token_ids(results: Sequence[RowResult]) -> list[int | None]:
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_id for result in results]


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
        make_row(params, seat=seat, position=50 + seat, prompt=prompt, generated=generated)
        for seat, (params, prompt, generated) in enumerate(requests)
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


MIXED = [
    SamplingParams(seed=seat, **fields)
    for seat, fields in enumerate(
        [
            {"temperature": 0.0},
            {"temperature": 0.8},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 1.5, "top_p": 0.999},
            {"temperature": 1.0, "top_k": 50},
            {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
            {"temperature": 0.0, "frequency_penalty": 1.0},
            {"temperature": 1.0, "num_logprobs": 5},
        ]
        * 4
    )
]


@pytest.mark.parametrize("vocab_size", [7, 255, 256, 257, 49152])
def test_results_do_not_depend_on_batch_neighbours(vocab_size: int) -> None:
    """Bit for bit, on coarse logits with many ties, alone and in two orders of 32."""
    logits = (random_logits(len(MIXED), vocab_size) * 4).round() / 4
    rows = [
        make_row(params, seat=seat, position=100 + seat, prompt=(1, 2), generated=(3, 3))
        for seat, params in enumerate(MIXED)
    ]
    order = list(reversed(range(len(rows))))

    together = Sampler(vocab_size).sample(logits, rows)
    shuffled = Sampler(vocab_size).sample(logits[order], [rows[idx] for idx in order])
    alone = [Sampler(vocab_size).sample(logits[idx : idx + 1], [row])[0] for idx, row in enumerate(rows)]

    assert alone == together
    assert list(reversed(shuffled)) == together


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, num_logprobs=2)], ids=["greedy", "drawn"])
def test_nan_logits_end_their_own_row_only(broken: float, params: SamplingParams) -> None:
    logits = random_logits(5)
    rows = [make_row(replace(params, seed=seat), seat=seat) for seat in range(5)]
    good = Sampler(VOCAB_SIZE).sample(logits, rows)

    logits[2, 17] = broken
    results = Sampler(VOCAB_SIZE).sample(logits, rows)

    assert results[2].token_id is None
    assert results[2].error is not None
    assert [results[idx] for idx in (0, 1, 3, 4)] == [good[idx] for idx in (0, 1, 3, 4)]


def test_row_of_minus_infinity_is_an_error() -> None:
    logits = torch.full((1, VOCAB_SIZE), -math.inf)

    (result,) = Sampler(VOCAB_SIZE).sample(logits, [make_row(GREEDY)])

    assert result.error is not None


def test_bias_outside_the_vocabulary_ends_its_own_row_only() -> None:
    logits = random_logits(2)
    bad = SamplingParams(seed=0, logit_bias=((VOCAB_SIZE, 1.0),))

    failed, good = Sampler(VOCAB_SIZE).sample(logits, [make_row(bad), make_row(GREEDY, seat=1)])

    assert failed.error == f"logit_bias names token {VOCAB_SIZE}; the vocabulary has {VOCAB_SIZE} tokens"
    assert good.token_id == int(logits[1].argmax())


def test_all_tokens_banned_is_an_error() -> None:
    params = replace(GREEDY, banned_token_ids=tuple(range(4)), min_tokens=1)

    (result,) = Sampler(4).sample(random_logits(1, 4), [make_row(params)])

    assert result.token_id is None
    assert result.error is not None


def test_logits_stay_unchanged() -> None:
    logits = random_logits(len(MIXED))
    before = logits.clone()

    Sampler(VOCAB_SIZE).sample(
        logits, [make_row(params, seat=seat, prompt=(1,)) for seat, params in enumerate(MIXED)]
    )

    assert torch.equal(logits, before)


def test_penalty_counts_follow_the_tokens_sampled_in_the_seat() -> None:
    params = SamplingParams(seed=0, temperature=0.0, frequency_penalty=2.0)
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    sampler = Sampler(3)
    first = make_row(params)

    tokens = token_ids(sampler.sample(logits, [first]))
    for _ in range(4):
        tokens += token_ids(sampler.sample(logits, [following(first, tokens)]))

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


def test_released_seat_forgets_its_counts() -> None:
    params = SamplingParams(seed=0, temperature=0.0, presence_penalty=2.0)
    logits = torch.tensor([[5.0, 4.0]])
    sampler = Sampler(2)
    sampler.sample(logits, [make_row(params)])

    sampler.release([0])

    assert token_ids(sampler.sample(logits, [make_row(params)])) == [0]
    with pytest.raises(AssertionError, match="penalties without history"):
        sampler.sample(logits, [replace(make_row(params, seat=1), history=None)])


def test_readmission_with_history_equals_an_undisturbed_run() -> None:
    params = SamplingParams(seed=0, temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.1)
    logits = random_logits(1, 50)
    sampler = Sampler(50)
    undisturbed = token_ids(sampler.sample(logits, [make_row(params, prompt=(1, 2))]))
    for _ in range(9):
        undisturbed += token_ids(sampler.sample(logits, [following(make_row(params), undisturbed)]))

    known = [token_id for token_id in undisturbed[:5] if token_id is not None]
    resumed = Sampler(50)
    tokens = token_ids(resumed.sample(logits, [make_row(params, seat=3, prompt=(1, 2), generated=known)]))
    for _ in range(4):
        tokens += token_ids(resumed.sample(logits, [following(make_row(params, seat=3), [*known, *tokens])]))

    assert tokens == undisturbed[5:]


def test_counts_grow_beyond_their_first_capacity() -> None:
    params = SamplingParams(seed=0, temperature=0.0, presence_penalty=100.0)
    logits = random_logits(1)
    sampler = Sampler(VOCAB_SIZE)
    tokens = token_ids(sampler.sample(logits, [make_row(params)]))
    for _ in range(299):
        tokens += token_ids(sampler.sample(logits, [following(make_row(params), tokens)]))

    assert tokens == logits[0].argsort(descending=True)[:300].tolist()


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
    rows = [make_row(params, seat=0, position=position) for position in range(1, num_draws + 1)]

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
            logits.expand(400, -1).contiguous(), [make_row(p, seat=seat) for seat, p in enumerate(params)]
        )
    )

    smallest = min(token_id for token_id in tokens if token_id is not None)
    assert 99 <= smallest < 150


def test_no_rows_give_no_results() -> None:
    assert Sampler(VOCAB_SIZE).sample(torch.empty((0, VOCAB_SIZE)), []) == []
