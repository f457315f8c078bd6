"""Sampling on the GPU: bias, penalties, masks, filters and the draw, over logits that stay there."""

from dataclasses import dataclass

import torch

from kernels.ops.gpu.tuning import launch_config, next_power_of_two
from kernels.ops.sampling import SPAN
from kernels.ops.sampling.gpu_counts import Histories, SlotCounts, update_counts
from kernels.ops.sampling.gpu_kernel import PARAMETERS, STATUS_OK, _bias_kernel, _sample_kernel

BIAS_BLOCK = 256
_INTS_PER_16_BYTES = 4


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to logits before everything else; -inf bans."""

    start: torch.Tensor
    """[num_rows + 1] int32 into ids and values"""
    ids: torch.Tensor
    """[n] int32, distinct within a row"""
    values: torch.Tensor
    """[n] float32"""


@dataclass(frozen=True, slots=True)
class Penalties:
    """The rows with penalties and the counts that these are computed from."""

    slots: torch.Tensor
    """[num_rows] int32; -1 for a row without penalties"""
    counts: SlotCounts
    histories: Histories | None = None


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that rows with a grammar may choose."""

    lines: torch.Tensor
    """[num_rows] int32 into words; -1 for a row that may choose any token"""
    words: torch.Tensor
    """[n, ceil(vocab_size / 32)] int32 bit masks, the lowest bit first"""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """One entry per row of the logits, on their device."""

    parameters: torch.Tensor
    """[num_rows, 6] float64, columns as in PARAMETERS; temperature 0 is greedy"""
    top_ks: torch.Tensor
    """[num_rows] int32, at most vocab_size; 0 keeps the whole vocabulary"""
    seeds: torch.Tensor
    """[num_rows] int64, the bits of unsigned seeds"""
    positions: torch.Tensor
    """[num_rows] int64: the position of the token that is sampled"""
    slots: torch.Tensor
    """[num_rows] int32"""
    ring: torch.Tensor
    """[num_slots, n] int32: sampled tokens by slot and position modulo n; new ones are written, 0 for failed rows"""
    bias: Bias | None = None
    penalties: Penalties | None = None
    allowed: Allowed | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results on the device, one entry per row."""

    token_ids: torch.Tensor
    """[num_rows] int32; only meaningful where the status is STATUS_OK"""
    statuses: torch.Tensor
    """[num_rows] int32"""
    logprobs: torch.Tensor
    """[num_rows] float32: the chosen token's in the model's own distribution"""
    packed: torch.Tensor
    """[3, n] int32: all of them as they lie in memory, n at least num_rows"""


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
    """Choose one token per row of logits [num_rows, vocab_size] float32, which stay unchanged."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert inputs.parameters.shape == (num_rows, len(PARAMETERS))
    assert inputs.parameters.dtype == torch.float64
    penalties = inputs.penalties
    has_adjusted = penalties is not None or inputs.allowed is not None or inputs.bias is not None
    # Holds adjusted logits first, then the weights of rows that draw.
    work = logits.clone() if has_adjusted else torch.empty_like(logits)
    if inputs.bias is not None:
        _add_bias(work, inputs.bias)
    if penalties is not None:
        update_counts(penalties.slots, inputs.positions, inputs.ring, penalties.counts, penalties.histories)
    config = launch_config("sampling", "any", logits.device)
    sampled = _allocate(num_rows, logits.device)
    arguments = {
        "raw": logits,
        "work": work,
        "parameters": inputs.parameters,
        "top_ks": inputs.top_ks,
        "seeds": inputs.seeds,
        "positions": inputs.positions,
        "slots": inputs.slots,
        "ring": inputs.ring,
        "counted_slots": inputs.slots if penalties is None else penalties.slots,
        "counts": inputs.slots if penalties is None else penalties.counts.counts,
        "allowed_lines": inputs.slots if inputs.allowed is None else inputs.allowed.lines,
        "allowed": inputs.slots if inputs.allowed is None else inputs.allowed.words,
        "token_ids": sampled.token_ids,
        "statuses": sampled.statuses,
        "logprobs": sampled.logprobs,
        "allowed_words": 0 if inputs.allowed is None else inputs.allowed.words.shape[1],
        "VOCAB": vocab_size,
        "BLOCK": min(config.block_n, max(SPAN, next_power_of_two(vocab_size))),
        "SPAN": SPAN,
        "RING": inputs.ring.shape[1],
        "HAS_ADJUSTED": has_adjusted,
        "HAS_COUNTS": penalties is not None,
        "HAS_ALLOWED": inputs.allowed is not None,
    }
    _sample_kernel.launch((num_rows,), arguments, num_warps=config.num_warps, num_stages=config.num_stages)
    return sampled


def _allocate(num_rows: int, device: torch.device) -> Sampled:
    """Allocate all results at once, so that one copy reads them back; each part is aligned for every number of rows."""
    width = -(-num_rows // _INTS_PER_16_BYTES) * _INTS_PER_16_BYTES
    packed = torch.empty((3, width), dtype=torch.int32, device=device)
    token_ids, statuses, logprobs = packed[:, :num_rows].unbind(0)
    return Sampled(token_ids, statuses, logprobs.view(torch.float32), packed)


def _add_bias(work: torch.Tensor, bias: Bias) -> None:
    arguments = {
        "logits": work,
        "bias_start": bias.start,
        "bias_ids": bias.ids,
        "bias": bias.values,
        "VOCAB": work.shape[1],
        "BLOCK": BIAS_BLOCK,
    }
    _bias_kernel.launch((work.shape[0],), arguments, num_warps=4, num_stages=1)


__all__ = [
    "STATUS_OK",
    "Allowed",
    "Bias",
    "Histories",
    "Penalties",
    "Sampled",
    "SamplingInputs",
    "SlotCounts",
    "sample",
]
