"""The device's sampler, except its equality with the host's, which the checks cover."""

import math

import numpy as np
import pytest
import torch

from kernels.ops.gpu.jit import Kernel
from kernels.ops.sampling.gpu import STATUS_OK, Allowed, sample
from kernels.ops.sampling.gpu_counts import _token_counts_kernel
from kernels.ops.sampling.gpu_kernel import _bias_kernel, _sample_kernel
from kernels.runtime.gpu.step_inputs import StepInputs
from kernels.sampling.cpu.sampler import Sampler
from kernels.sampling.gpu.sampler import GpuSampler
from kernels.sampling.gpu.sampling_inputs import host_tensors, mask_tensors, prepare, sampling_inputs
from kernels.tools.checks.sampling import _assert_same, check_sampling, make_params
from scheduler.plan import RowResult, SamplingParams, ScheduledRow, TokenLogprobs

CPU = torch.device("cpu")
VOCAB = 70


def row(
    slot: int,
    sampling: SamplingParams,
    history: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    position: int = 9,
) -> ScheduledRow:
    return ScheduledRow(f"r{slot}", slot, (1,), position, (0,), sampling, 3, history)


def test_hazard_a_nan_row_ends_alone() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 4], logits[2, 5] = math.nan, math.inf
    rows = [row(slot, SamplingParams(seed=slot)) for slot in range(3)]
    good, nan, infinite = GpuSampler(VOCAB, StepInputs(CPU, 4)).sample(logits, rows)
    assert good.error is None
    assert good == Sampler(VOCAB).sample(logits[:1], rows[:1])[0]
    assert nan.error == infinite.error == "the model produced NaN or infinite logits for this row"
    assert nan.token_id is None


def test_a_rows_token_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [row(slot, SamplingParams(seed=slot, top_p=0.8)) for slot in range(5)]
    together = GpuSampler(VOCAB, StepInputs(CPU, 8)).sample(logits, rows)
    for i in range(5):
        assert GpuSampler(VOCAB, StepInputs(CPU, 8)).sample(logits[i : i + 1], rows[i : i + 1]) == [
            together[i]
        ]


def test_hazard_a_slots_counts_end_with_its_request() -> None:
    """The second request on a slot starts from its own history, whatever the first one generated."""
    params = SamplingParams(seed=0, temperature=0.0, frequency_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 1.5, 1.0
    sampler = GpuSampler(VOCAB, StepInputs(CPU, 2))
    assert sampler.sample(logits, [row(1, params, ((1,), ()))])[0].token_id == 7
    assert sampler.sample(logits, [row(1, params, position=10)])[0].token_id == 8, (
        "token 7 was generated once"
    )
    assert sampler.sample(logits, [row(1, params, ((1,), ()))])[0].token_id == 7


def test_hazard_a_step_that_runs_again_counts_nothing_twice() -> None:
    """Repeated after a failed step, and even if the next step had already run, it gives the same tokens."""
    params = SamplingParams(seed=0, temperature=0.0, frequency_penalty=1.0)
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 7], logits[0, 8] = 4.5, 3.0
    sampler = GpuSampler(VOCAB, StepInputs(CPU, 2))
    rows = [row(1, params, ((1,), ()) if step == 0 else None, position=9 + step) for step in range(5)]
    expected = [7, 7, 8, 7, 8]
    assert [sampler.sample(logits, [each])[0].token_id for each in rows] == expected
    for step in (0, 1, 1, 2, 1, 2, 3, 2, 3, 4):
        assert sampler.sample(logits, [rows[step]])[0].token_id == expected[step], step


def test_each_slot_keeps_the_tokens_that_the_next_step_reads() -> None:
    """Tokens are kept by position; a row that fails leaves token 0."""
    inputs = StepInputs(CPU, 4)
    logits = torch.full((3, VOCAB), -9.0)
    logits[0, 7], logits[1, 8], logits[2, 9] = 1.0, math.nan, 1.0
    inputs.ring.fill_(33)
    greedy = SamplingParams(seed=0, temperature=0.0)
    rows = [row(3, greedy, position=9), row(0, greedy, position=10), row(1, greedy, position=11)]
    GpuSampler(VOCAB, inputs).sample(logits, rows)
    assert inputs.ring.tolist() == [[33, 33, 33, 0], [9, 33, 33, 33], [33] * 4, [33, 33, 7, 33]]


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_an_id_outside_the_vocabulary_ends_its_row_alone(token_id: int) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [row(0, SamplingParams(seed=0, logit_bias=((token_id, 1.0),))), row(1, SamplingParams(seed=1))]
    bad, good = GpuSampler(VOCAB, StepInputs(CPU, 2)).sample(logits, rows)
    assert bad.error == f"logit_bias names token {token_id}; the vocabulary has {VOCAB} tokens"
    assert good.error is None


def test_logits_stay_as_they_were() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    params = SamplingParams(seed=0, logit_bias=((1, 5.0),), repetition_penalty=1.5)
    GpuSampler(VOCAB, StepInputs(CPU, 1)).sample(logits, [row(0, params, ((2,), (3,)))])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.7}]
)
def test_filters_keep_exactly_what_the_host_keeps(filters: dict[str, float]) -> None:
    """Few tokens and many seeds: a nucleus that is one token off shows."""
    logits = torch.tensor([0.1, 1.0, -0.5, 0.7, 0.7, -1.0, 0.9, 0.0]).repeat(24, 1)
    rows = [row(seed, SamplingParams(seed=seed, **filters)) for seed in range(24)]
    ours, theirs = GpuSampler(8, StepInputs(CPU, 24)).sample(logits, rows), Sampler(8).sample(logits, rows)
    assert ours == theirs
    assert len({result.token_id for result in ours}) > 1


def test_equal_weights_at_top_ks_edge_count_as_mass_only_up_to_k() -> None:
    """One token of weight 1 and many of 0.5: of the three that top-k counts, half of the mass is the first one's."""
    logits = torch.full((6, VOCAB), math.log(0.5))
    logits[:, 9] = 0.0
    rows = [row(seed, SamplingParams(seed=seed, top_k=3, top_p=0.49)) for seed in range(6)]
    results = GpuSampler(VOCAB, StepInputs(CPU, 8)).sample(logits, rows)
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
    assert [result.token_id for result in GpuSampler(VOCAB, StepInputs(CPU, 2)).sample(logits, rows)] == [
        8,
        7,
    ]


class Variants:
    """Replaces launches; records the compile-time parameters of each."""

    def __init__(self) -> None:
        self.seen: set[tuple[object, ...]] = set()

    def watch(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        launch = kernel.launch

        def watched(grid: tuple[int, ...], arguments: dict[str, object], **options: int) -> None:
            chosen = sorted((name, value) for name, value in arguments.items() if isinstance(value, bool))
            self.seen.add((kernel.name, *chosen))
            launch(grid, arguments, **options)

        monkeypatch.setattr(kernel, "launch", watched)


def test_warmup_asks_for_every_variant_that_a_step_may_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not compiled by then is compiled while serving."""
    warm, served = Variants(), Variants()
    inputs = StepInputs(CPU, 4)
    logits = torch.zeros((1, VOCAB))
    with monkeypatch.context() as patch:
        for kernel in (_sample_kernel, _bias_kernel, _token_counts_kernel):
            warm.watch(kernel, patch)
        GpuSampler(VOCAB, inputs).warmup(logits)
    with monkeypatch.context() as patch:
        for kernel in (_sample_kernel, _bias_kernel, _token_counts_kernel):
            served.watch(kernel, patch)
        check_sampling(CPU, VOCAB, 0.0, 2)
        for params in make_params(VOCAB):
            history = ((1, 2), (3,)) if params.has_penalties else None
            sampler = GpuSampler(VOCAB, inputs)
            sampler.sample(logits, [row(0, params, history)])
            sampler.sample(logits, [row(0, params, position=10)])
    assert served.seen <= warm.seen
    assert len(warm.seen) == 8


def test_a_bit_mask_leaves_only_what_it_names() -> None:
    """Words of 32 tokens, the last one not full; the sign bit; a row without mask beside them."""
    rows = [row(slot, SamplingParams(seed=5, temperature=float(slot > 0))) for slot in range(4)]
    tensors = host_tensors([prepare(each, VOCAB, None) for each in rows])
    words = np.zeros((3, -(-VOCAB // 32)), dtype=np.int32)
    words[0, 1] = -(1 << 31)  # token 63
    words[1, 2] = 1 << 5  # token 69, the last one
    masks = mask_tensors({0: words[0], 1: words[1], 3: words[2]}, num_rows=4)
    inputs = sampling_inputs(tensors, StepInputs(CPU, 4).ring, None, Allowed(**masks))
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    found = sample(logits, inputs)
    assert found.token_ids[:2].tolist() == [63, 69]
    assert found.statuses[:3].tolist() == [STATUS_OK] * 3
    assert found.statuses[3] != STATUS_OK, "nothing is allowed"
    free = GpuSampler(VOCAB, StepInputs(CPU, 4)).sample(logits[2:3], rows[2:3])
    assert found.token_ids[2] == free[0].token_id


def test_the_check_lets_devices_differ_only_among_equals_at_the_lists_end() -> None:
    """Which of them `topk` lists is unspecified and differs between devices."""

    def listing(*token_ids: int) -> RowResult:
        top = tuple((token_id, float(logits[token_id])) for token_id in token_ids)
        return RowResult("r", token_id=0, logprobs=TokenLogprobs(-0.5, top))

    logits = torch.tensor([3.0, 3.0, 2.0, 2.0, 1.0])
    _assert_same(listing(0, 1, 2), listing(0, 1, 3), logits)
    with pytest.raises(AssertionError):
        _assert_same(listing(1, 0, 2), listing(0, 1, 2), logits)
    with pytest.raises(AssertionError):
        _assert_same(listing(0, 1, 4), listing(0, 1, 2), logits)
