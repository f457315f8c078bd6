"""Rows and logits for a sampler, and the tokens that it chooses."""

from collections.abc import Sequence

import torch

from scheduler.plan import RowResult, SamplingParams, ScheduledRow

VOCAB_SIZE = 1000
GREEDY = SamplingParams(seed=0, temperature=0.0)


def make_row(
    params: SamplingParams,
    *,
    slot: int = 0,
    position: int = 9,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> ScheduledRow:
    return ScheduledRow(
        request_id=f"r{slot}",
        slot=slot,
        token_ids=(0,),
        num_computed_tokens=position - 1,
        block_table=(0,),
        sampling=params,
        num_generated_tokens=len(generated),
        history=(tuple(prompt), tuple(generated)) if params.needs_history else None,
    )


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3


def token_ids(results: Sequence[RowResult]) -> list[int | None]:
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_id for result in results]
