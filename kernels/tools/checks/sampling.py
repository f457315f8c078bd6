"""Sampling on the device against the host's sampler: the same token for the same logits, seed and position."""

import math
from dataclasses import replace
from functools import partial

import torch

from kernels.runtime.gpu.step_inputs import StepInputs
from kernels.sampling.cpu.sampler import Sampler
from kernels.sampling.gpu.sampler import GpuSampler
from kernels.tools.checks.case import Check, generator, poisoned_outputs
from scheduler.plan import PENDING_TOKEN, RowResult, SamplingParams, ScheduledRow

_SEED = 1 << 63
"""Seeds are unsigned; this one sets the sign bit of a signed integer."""


def make_params(vocab_size: int) -> list[SamplingParams]:
    """One row for each rule and for their combinations."""
    seed = _SEED
    biased = ((0, 5.0), (vocab_size - 1, 4.0), (vocab_size // 2, -100.0))
    return [
        SamplingParams(seed, temperature=0.0),
        SamplingParams(seed + 1, temperature=0.0, logit_bias=biased, num_logprobs=2),
        SamplingParams(seed + 2),
        SamplingParams(seed + 3, temperature=0.7, top_k=1),
        SamplingParams(seed + 4, temperature=1.5, top_k=40, num_logprobs=0),
        SamplingParams(seed + 5, top_p=0.9),
        SamplingParams(seed + 6, top_p=0.0, num_logprobs=20),
        SamplingParams(seed + 7, top_k=30, top_p=0.6, min_p=0.02),
        SamplingParams(seed + 8, min_p=0.1, top_k=vocab_size),
        SamplingParams(seed + 9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
        SamplingParams(seed + 10, temperature=0.0, repetition_penalty=2.0, top_p=0.5),
        SamplingParams(seed + 11, banned_token_ids=tuple(range(10)), min_tokens=100, logit_bias=((3, 9.0),)),
        SamplingParams(seed + 12, banned_token_ids=tuple(range(vocab_size)), min_tokens=100),
        SamplingParams(seed + 13, temperature=0.5),
    ]


def check_sampling(device: torch.device, vocab_size: int, step: float, num_steps: int) -> None:
    """Compare both samplers. Logits rounded to multiples of `step` (0: not rounded) cause ties; one row is NaN.

    The tokens of one step are pending in the next step on the device but known on the host. Every other step runs
    twice on the device.
    """
    random = generator(vocab_size)
    ours, theirs = GpuSampler(vocab_size, StepInputs(device, 16)), Sampler(vocab_size)
    params = make_params(vocab_size)
    generated = [[4, 4, 5] for _ in params]
    for step_idx in range(num_steps):
        logits = 3 * torch.randn(len(params), vocab_size, generator=random)
        if step:
            logits = (logits / step).round() * step
        logits[-1, vocab_size // 3] = math.nan
        rows = [_row(slot, row, generated[slot]) for slot, row in enumerate(params)]
        expected = theirs.sample(logits, rows)
        pending = rows if step_idx == 0 else [replace(row, token_ids=(PENDING_TOKEN,)) for row in rows]
        for _ in range(1 + step_idx % 2):
            with poisoned_outputs():
                actual = ours.sample(logits.to(device), pending)
            for ours_row, theirs_row, line in zip(actual, expected, logits, strict=True):
                _assert_same(ours_row, theirs_row, line)
        for tokens, result in zip(generated, expected, strict=True):
            tokens.append(result.token_id or 0)


def _row(slot: int, params: SamplingParams, generated: list[int]) -> ScheduledRow:
    """The first row of a request has a history."""
    prompt = (1, 2, 3)
    is_first = len(generated) == 3
    return ScheduledRow(
        f"r{slot}",
        slot,
        (generated[-1],),
        len(prompt) + len(generated) - 1,
        (0,),
        params,
        len(generated),
        (prompt, tuple(generated)) if is_first and params.needs_history else None,
    )


def _assert_same(actual: RowResult, expected: RowResult, logits: torch.Tensor) -> None:
    """`logits` [vocab_size] are the row's. Among tokens equal to the last listed one, each sampler may list any."""
    assert (actual.token_id, actual.error) == (expected.token_id, expected.error), (actual, expected)
    if expected.logprobs is None:
        assert actual.logprobs is None
        return
    assert actual.logprobs is not None
    for (ours_id, _), (theirs_id, _) in zip(actual.logprobs.top, expected.logprobs.top, strict=True):
        last = logits[expected.logprobs.top[-1][0]]
        assert ours_id == theirs_id or logits[ours_id] == logits[theirs_id] == last, (actual, expected)
    ours = [actual.logprobs.logprob, *(value for _, value in actual.logprobs.top)]
    theirs = [expected.logprobs.logprob, *(value for _, value in expected.logprobs.top)]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=1e-4)


CASES = (
    Check(
        "sampling-v300",
        ("sampling", "token_counts"),
        partial(check_sampling, vocab_size=300, step=0.0, num_steps=3),
    ),
    Check(
        "sampling-v300-ties",
        ("sampling", "token_counts"),
        partial(check_sampling, vocab_size=300, step=0.5, num_steps=3),
    ),
    Check(
        "sampling-v5000",
        ("sampling", "token_counts"),
        partial(check_sampling, vocab_size=5000, step=0.0, num_steps=1),
    ),
)
