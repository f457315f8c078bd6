"""Rotary position tables, with the frequency scalings of Llama 3 and linear interpolation."""

import math

import torch

from kernels.config import ModelConfig, RopeScaling


def rotary_tables(
    config: ModelConfig, num_positions: int, local_theta: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [num_positions, head_dim / 2] in float32; those of Gemma 3's windows are not scaled."""
    if local_theta is None:
        inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    else:
        inv_freq = inverse_frequencies(config.head_dim, local_theta, None)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
    return angles.cos(), angles.sin()


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """[head_dim / 2] float32: by how much each pair of a head turns per position."""
    half = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (theta**half)
    return inv_freq if scaling is None else _scaled(inv_freq, scaling)


def _scaled(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind != "llama3":
        raise ValueError(f"rope_scaling.kind is {scaling.kind!r}; known are llama3 and linear")
    # Low frequencies are slowed by `factor`, high ones kept, those between blended (Llama 3.1's rule).
    wavelength = 2 * math.pi / inv_freq
    original = scaling.original_max_position_embeddings
    blend = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / scaling.factor + blend * inv_freq
