"""No row affects another, not even a broken one."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.sampling.cpu.sampler import Sampler
from scheduler.plan import SamplingParams
from tests.kernels.sampling.rows import GREEDY, VOCAB_SIZE, make_row, random_logits

MIXED = [
    SamplingParams(seed=slot, **fields)
    for slot, fields in enumerate(
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
        make_row(params, slot=slot, position=100 + slot, prompt=(1, 2), generated=(3, 3))
        for slot, params in enumerate(MIXED)
    ]
    order = list(reversed(range(len(rows))))

    together = Sampler(vocab_size).sample(logits, rows)
    shuffled = Sampler(vocab_size).sample(logits[order], [rows[idx] for idx in order])
    alone = [Sampler(vocab_size).sample(logits[idx : idx + 1], [row])[0] for idx, row in enumerate(rows)]

    assert alone == together
    assert list(reversed(shuffled)) == together


def test_logits_stay_unchanged() -> None:
    logits = random_logits(len(MIXED))
    before = logits.clone()

    Sampler(VOCAB_SIZE).sample(
        logits, [make_row(params, slot=slot, prompt=(1,)) for slot, params in enumerate(MIXED)]
    )

    assert torch.equal(logits, before)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, num_logprobs=2)], ids=["greedy", "drawn"])
def test_nan_logits_end_their_own_row_only(broken: float, params: SamplingParams) -> None:
    logits = random_logits(5)
    rows = [make_row(replace(params, seed=slot), slot=slot) for slot in range(5)]
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

    failed, good = Sampler(VOCAB_SIZE).sample(logits, [make_row(bad), make_row(GREEDY, slot=1)])

    assert failed.error == f"logit_bias names token {VOCAB_SIZE}; the vocabulary has {VOCAB_SIZE} tokens"
    assert good.token_id == int(logits[1].argmax())


def test_all_tokens_banned_is_an_error() -> None:
    params = replace(GREEDY, banned_token_ids=tuple(range(4)), min_tokens=1)

    (result,) = Sampler(4).sample(random_logits(1, 4), [make_row(params)])

    assert result.token_id is None
    assert result.error is not None
