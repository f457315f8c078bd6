"""Sampling on the GPU: parameters up in one copy, tokens and errors down in one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.gpu.staging import Staging
from kernels.gpu.tuning import launch_config, next_power_of_two
from kernels.ops.sampling.gpu_kernel import PARAMETERS, STATUS_OK, _bias_kernel, _sample_kernel

SPAN = 256
"""Weights are summed in spans of this, as on the CPU."""
BIAS_BLOCK = 256


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """One entry per row of the logits, on their device."""

    parameters: torch.Tensor
    """[num_rows, 6] float64, columns as in PARAMETERS; temperature 0 is greedy"""
    top_ks: torch.Tensor
    """[num_rows] int32; 0 keeps the whole vocabulary, as must be said for a top_k beyond it"""
    seeds: torch.Tensor
    """[num_rows] int64, the bits of an unsigned one"""
    positions: torch.Tensor
    """[num_rows] int64"""
    seats: torch.Tensor
    """[num_rows] int32: row of `counts`; -1 without penalties"""
    bias_start: torch.Tensor | None = None
    """[num_rows + 1] int32 into bias_ids [n] int32 (distinct within a row) and bias [n] float32; -inf bans"""
    bias_ids: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    """[num_seats, vocab_size] int32: twice the times generated, plus 1 if in the prompt; updated in place"""
    allowed: torch.Tensor | None = None
    """[num_rows, ceil(vocab_size / 32)] int32 bit mask of the tokens that may be chosen"""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Still on the device, one entry per row."""

    token_ids: torch.Tensor
    """[num_rows] int32; only meaningful where the status is STATUS_OK"""
    statuses: torch.Tensor
    """[num_rows] int32"""
    logprobs: torch.Tensor
    """[num_rows] float32: of the chosen token in the model's own distribution"""


def sample(logits: torch.Tensor, inputs: SampleInputs) -> Sampled:
    """Choose one token per row of logits [num_rows, vocab_size] float32, which stay unchanged."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert inputs.parameters.shape == (num_rows, len(PARAMETERS))
    assert inputs.parameters.dtype == torch.float64
    has_counts, has_allowed = inputs.counts is not None, inputs.allowed is not None
    has_adjusted = has_counts or has_allowed or inputs.bias_start is not None
    work = logits.clone() if has_adjusted else logits
    if inputs.bias_start is not None:
        _add_bias(work, inputs)
    config = launch_config("sampling", "any", logits.device)
    sampled = Sampled(
        torch.empty(num_rows, dtype=torch.int32, device=logits.device),
        torch.empty(num_rows, dtype=torch.int32, device=logits.device),
        torch.empty(num_rows, dtype=torch.float32, device=logits.device),
    )
    arguments = {
        "raw": logits,
        "work": work,
        "parameters": inputs.parameters,
        "top_ks": inputs.top_ks,
        "seeds": inputs.seeds,
        "positions": inputs.positions,
        "seats": inputs.seats,
        "counts": inputs.seats if inputs.counts is None else inputs.counts,
        "allowed": inputs.seats if inputs.allowed is None else inputs.allowed,
        "token_ids": sampled.token_ids,
        "statuses": sampled.statuses,
        "logprobs": sampled.logprobs,
        "allowed_stride": 0 if inputs.allowed is None else inputs.allowed.stride(0),
        "VOCAB": vocab_size,
        "BLOCK": min(config.block_n, max(SPAN, next_power_of_two(vocab_size))),
        "SPAN": SPAN,
        "HAS_ADJUSTED": has_adjusted,
        "HAS_COUNTS": has_counts,
        "HAS_ALLOWED": has_allowed,
    }
    _sample_kernel.launch((num_rows,), arguments, num_warps=config.num_warps, num_stages=config.num_stages)
    return sampled


def _add_bias(work: torch.Tensor, inputs: SampleInputs) -> None:
    assert inputs.bias_ids is not None
    assert inputs.bias is not None
    arguments = {
        "logits": work,
        "bias_start": inputs.bias_start,
        "bias_ids": inputs.bias_ids,
        "bias": inputs.bias,
        "VOCAB": work.shape[1],
        "BLOCK": BIAS_BLOCK,
    }
    _bias_kernel.launch((work.shape[0],), arguments, num_warps=4, num_stages=1)


@dataclass(frozen=True, slots=True)
class RowParams:
    """What the host knows of one row, as plain numbers."""

    parameters: tuple[float, float, float, float, float, float]
    top_k: int
    seed: int
    position: int
    seat: int
    bias: dict[int, float]
    allowed: npt.NDArray[np.int32] | None = None
    """[ceil(vocab_size / 32)] bit mask; None allows every token"""


def upload(rows: Sequence[RowParams], counts: torch.Tensor | None, staging: Staging) -> SampleInputs:
    """The rows' parameters on the device, by one copy."""
    host = {
        "parameters": torch.tensor([row.parameters for row in rows], dtype=torch.float64),
        "seeds": torch.tensor([_as_signed(row.seed) for row in rows], dtype=torch.int64),
        "positions": torch.tensor([row.position for row in rows], dtype=torch.int64),
        "top_ks": torch.tensor([row.top_k for row in rows], dtype=torch.int32),
        "seats": torch.tensor([row.seat for row in rows], dtype=torch.int32),
    }
    if any(row.bias for row in rows):
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row.bias))
        host["bias_start"] = torch.tensor(starts, dtype=torch.int32)
        host["bias_ids"] = torch.tensor([i for row in rows for i in row.bias], dtype=torch.int32)
        host["bias"] = torch.tensor([b for row in rows for b in row.bias.values()], dtype=torch.float32)
    masks = [row.allowed for row in rows if row.allowed is not None]
    if masks:
        everything = np.full_like(masks[0], -1)
        stacked = np.stack([everything if row.allowed is None else row.allowed for row in rows])
        host["allowed"] = torch.from_numpy(stacked)
    on_device = staging.upload(host)
    return SampleInputs(**on_device, counts=counts if any(row.seat >= 0 for row in rows) else None)


def _as_signed(seed: int) -> int:
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def reset_counts(counts: torch.Tensor, seat: int, prompt: Iterable[int], generated: Sequence[int]) -> None:
    """Start a seat's history over. Once per admission of a request with penalties."""
    vocab_size = counts.shape[1]
    line = torch.zeros(vocab_size, dtype=torch.int32)
    if generated:
        line += 2 * torch.bincount(torch.tensor(generated), minlength=vocab_size).to(torch.int32)
    line[torch.tensor(list(set(prompt)), dtype=torch.int64)] += 1
    counts[seat] = line.to(counts.device)


__all__ = ["STATUS_OK", "RowParams", "SampleInputs", "Sampled", "reset_counts", "sample", "upload"]
