"""Weights in the order in which the register tile reads them (see kernels.ops.cpu.tile)."""

from dataclasses import dataclass, replace

import torch

from kernels.memory import Arena

PANEL = 32
"""Output columns of a panel."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A layer y = x · weightᵀ + bias for the CPU kernels; its weight is bfloat16, or int8 with a scale per output."""

    panels: torch.Tensor
    """bfloat16 [num_panels, in / 2, 32, 2] or int8 [num_panels, in / 4, 32, 4]"""
    bias: torch.Tensor | None
    """float32 [num_panels * 32]"""
    scales: torch.Tensor | None
    """int8 only: float32 [num_panels * 32]"""
    offsets: torch.Tensor | None
    """int8 only: int32 [num_panels, num_groups, 32], minus 128 times the column sums: activations are
    stored as value + 128 because the instruction multiplies unsigned by signed bytes."""
    num_inputs: int
    num_outputs: int
    num_groups: int
    """int8 only (else 1): equal runs of inputs, each with its own activation scale."""


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    quantized: bool = False,
    arena: Arena | None = None,
) -> PackedLinear:
    """Pack a weight [num_outputs, num_inputs] and a bias [num_outputs], both of any float type, into the arena.

    Raises ValueError if num_inputs is not a multiple of 4.
    """
    arena = arena or Arena()
    num_outputs, num_inputs = weight.shape
    if num_inputs % 4:
        raise ValueError(f"num_inputs is {num_inputs}; it must be a multiple of 4")
    num_panels = -(-num_outputs // PANEL)
    if bias is not None:
        bias = torch.nn.functional.pad(bias.float(), (0, num_panels * PANEL - num_outputs)).contiguous()
    if not quantized:
        return PackedLinear(
            _panels(weight.bfloat16(), 2, arena), bias, None, None, num_inputs, num_outputs, 1
        )
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min(1e-12) / 127
    codes = (wide / scales.unsqueeze(1)).round().to(torch.int8)
    num_groups = num_inputs // group_size(num_inputs)
    panels = _panels(codes, 4, arena)
    sums = panels.view(num_panels, num_groups, -1, PANEL, 4).sum((2, 4), dtype=torch.int32)
    scales = torch.nn.functional.pad(scales, (0, num_panels * PANEL - num_outputs)).contiguous()
    return PackedLinear(panels, bias, scales, (-128 * sums).contiguous(), num_inputs, num_outputs, num_groups)


def group_size(num_inputs: int) -> int:
    """Return how many inputs share an activation scale: the largest divisor up to 64 that 16 divides, else all."""
    return next((size for size in range(64, 15, -16) if num_inputs % size == 0), num_inputs)


def pack_gate_up(
    gate: torch.Tensor, up: torch.Tensor, *, quantized: bool = False, arena: Arena | None = None
) -> PackedLinear:
    """Pack gate and up [intermediate, hidden], any float type, in alternating runs of 16 rows.

    A panel then holds both for the same 16 columns. Raises ValueError as pack_linear does.
    """
    pad = -gate.shape[0] % 16
    halves = [
        torch.nn.functional.pad(half, (0, 0, 0, pad)).reshape(-1, 16, gate.shape[1]) for half in (gate, up)
    ]
    packed = pack_linear(torch.stack(halves, 1).flatten(0, 2), quantized=quantized, arena=arena)
    return replace(packed, num_outputs=2 * gate.shape[0])


def _panels(weight: torch.Tensor, pack: int, arena: Arena) -> torch.Tensor:
    num_outputs, num_inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -num_outputs % PANEL))
    ordered = padded.view(-1, PANEL, num_inputs // pack, pack).permute(0, 2, 1, 3)
    return arena.empty(ordered.shape, weight.dtype).copy_(ordered)
