"""The device's sampler beyond equality with the host's, which the checks cover."""

import math

import pytest
import torch

from kernels.gpu.sampler import GpuSampler
from kernels.gpu.staging import Staging
from kernels.ops.sampling.gpu import STATUS_OK, RowParams, SampleInputs, sample, upload
from kernels.sampling import Sampler
from scheduler.plan import SamplingParams, ScheduledRow

CPU = torch.device("cpu")
VOCAB = 70


def row(
    seat: int, sampling: SamplingParams, history: tuple[tuple[int, ...], tuple[int, ...]] | None = None
) -> ScheduledRow:
    return ScheduledRow(f"r{seat}", seat, (1,), 9, (0,), sampling, 3, history)


def test_hazard_a_nan_row_ends_alone() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 4], logits[2, 5] = math.nan, math.inf
    rows = [row(seat, SamplingParams(seed=seat)) for seat in range(3)]
    good, nan, infinite = GpuSampler(VOCAB, 4, CPU).sample(logits, rows)
    assert good.error is None
    assert good == Sampler(VOCAB).sample(logits[:1], rows[:1])[0]
    assert nan.error == infinite.error == "the model produced NaN or infinite logits for this row"
    assert nan.token_id is None


def test_a_rows_token_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [row(seat, SamplingParams(seed=seat, top_p=0.8)) for seat in range(5)]
    together = GpuSampler(VOCAB, 8, CPU).sample(logits, rows)
    for i in range(5):
        assert GpuSampler(VOCAB, 8, CPU).sample(logits[i : i + 1], rows[i : i + 1]) == [together[i]]


def test_hazard_a_seats_counts_end_with_its_request() -> None:
    """The second request on a seat starts from its own history, whatever the first one generated."""
    params = SamplingParams(seed=0, temperature=0.0, frequency_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 1.5, 1.0
    sampler = GpuSampler(VOCAB, 2, CPU)
    assert sampler.sample(logits, [row(1, params, ((1,), ()))])[0].token_id == 7
    assert sampler.sample(logits, [row(1, params)])[0].token_id == 8, "token 7 was generated once"
    assert sampler.sample(logits, [row(1, params, ((1,), ()))])[0].token_id == 7


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_an_id_outside_the_vocabulary_ends_its_row_alone(token_id: int) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [row(0, SamplingParams(seed=0, logit_bias=((token_id, 1.0),))), row(1, SamplingParams(seed=1))]
    bad, good = GpuSampler(VOCAB, 2, CPU).sample(logits, rows)
    assert bad.error == f"logit_bias names token {token_id}; the vocabulary has {VOCAB} tokens"
    assert good.error is None


def test_logits_stay_as_they_were() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    params = SamplingParams(seed=0, logit_bias=((1, 5.0),), repetition_penalty=1.5)
    GpuSampler(VOCAB, 1, CPU).sample(logits, [row(0, params, ((2,), (3,)))])
    assert torch.equal(logits, before)


def test_a_bit_mask_leaves_only_what_a_grammar_allows() -> None:
    """Words of 32 tokens; the last word is not full."""
    rows = [
        RowParams((temperature, 1.0, 0.0, 1.0, 0.0, 0.0), 0, 5, 6, -1, {}) for temperature in (0.0, 1.0, 1.0)
    ]
    inputs = upload(rows, None, Staging(CPU))
    allowed = torch.zeros((3, -(-VOCAB // 32)), dtype=torch.int32)
    allowed[0, 1] = -(1 << 31)  # token 63: the sign bit
    allowed[1, 2] = 1 << 5  # token 69, the last one
    masked = SampleInputs(
        inputs.parameters, inputs.top_ks, inputs.seeds, inputs.positions, inputs.seats, allowed=allowed
    )
    found = sample(torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4)), masked)
    assert found.token_ids[:2].tolist() == [63, 69]
    assert found.statuses.tolist()[:2] == [STATUS_OK, STATUS_OK]
    assert found.statuses[2] != STATUS_OK, "nothing is allowed"


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.7}]
)
def test_filters_keep_exactly_what_the_host_keeps(filters: dict[str, float]) -> None:
    """Few tokens and many seeds: a nucleus that is one token off shows."""
    logits = torch.tensor([0.1, 1.0, -0.5, 0.7, 0.7, -1.0, 0.9, 0.0]).repeat(24, 1)
    rows = [row(seed, SamplingParams(seed=seed, **filters)) for seed in range(24)]
    ours, theirs = GpuSampler(8, 24, CPU).sample(logits, rows), Sampler(8).sample(logits, rows)
    assert ours == theirs
    assert len({result.token_id for result in ours}) > 1


def test_equal_weights_at_top_ks_edge_count_as_mass_only_up_to_k() -> None:
    """One token of weight 1 and many of 0.5: of the three that top-k counts, half of the mass is the first one's."""
    logits = torch.full((6, VOCAB), math.log(0.5))
    logits[:, 9] = 0.0
    rows = [row(seed, SamplingParams(seed=seed, top_k=3, top_p=0.49)) for seed in range(6)]
    results = GpuSampler(VOCAB, 8, CPU).sample(logits, rows)
    assert results == Sampler(VOCAB).sample(logits, rows)
    assert {result.token_id for result in results} == {9}


def test_repetition_penalty_covers_the_prompt_and_the_others_do_not() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 7], logits[:, 8] = 1.5, 1.0
    history = ((7,), ())
    rows = [
        row(0, SamplingParams(seed=0, temperature=0.0, repetition_penalty=2.0), history),
        row(1, SamplingParams(seed=0, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0), history),
    ]
    assert [result.token_id for result in GpuSampler(VOCAB, 2, CPU).sample(logits, rows)] == [8, 7]
