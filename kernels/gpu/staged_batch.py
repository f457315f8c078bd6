"""A host batch on the device: as it is, or padded to a bucket so that a captured graph fits it."""

from dataclasses import fields

import torch

from kernels.batch import ForwardBatch
from kernels.gpu.step_inputs import StepInputs

_TENSORS = tuple(field.name for field in fields(ForwardBatch) if field.name != "num_decode_rows")


def upload_batch(inputs: StepInputs, batch: ForwardBatch) -> ForwardBatch:
    """The same batch on the device, by one copy, which takes along what the sampler has added."""
    return ForwardBatch(**inputs.upload(batch_tensors(batch)), num_decode_rows=batch.num_decode_rows)


def batch_tensors(batch: ForwardBatch) -> dict[str, torch.Tensor]:
    return {name: getattr(batch, name) for name in _TENSORS}


def pad_decode(batch: ForwardBatch, num_rows: int, num_blocks: int) -> ForwardBatch:
    """A batch of decoding rows with rows added up to `num_rows` and tables widened to `num_blocks`.

    Added rows have no context and the slot -1: they read nothing, write nothing, and their logits mean nothing. All
    rows sample, so that the shapes depend on the bucket alone.
    """
    rows, width = batch.block_tables.shape
    tables = torch.zeros((num_rows, num_blocks), dtype=torch.int32)
    tables[:rows, :width] = batch.block_tables
    return ForwardBatch(
        token_ids=_extended(batch.token_ids, num_rows, 0),
        positions=_extended(batch.positions, num_rows, 0),
        slot_mapping=_extended(batch.slot_mapping, num_rows, -1),
        block_tables=tables,
        query_start=torch.arange(num_rows + 1, dtype=torch.int32),
        context_lens=_extended(batch.context_lens, num_rows, 0),
        sample_indices=torch.arange(num_rows, dtype=torch.int64),
        num_decode_rows=num_rows,
    )


def empty_decode() -> ForwardBatch:
    """No rows at all: padded, it warms a bucket up without touching the pool."""
    return ForwardBatch(
        token_ids=torch.empty(0, dtype=torch.int64),
        positions=torch.empty(0, dtype=torch.int64),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        block_tables=torch.empty((0, 1), dtype=torch.int32),
        query_start=torch.zeros(1, dtype=torch.int32),
        context_lens=torch.empty(0, dtype=torch.int32),
        sample_indices=torch.empty(0, dtype=torch.int64),
        num_decode_rows=0,
    )


def _extended(values: torch.Tensor, size: int, fill: int) -> torch.Tensor:
    extended = torch.full((size,), fill, dtype=values.dtype)
    extended[: values.shape[0]] = values
    return extended
