"""Rotary position tables, with the frequency scalings of Llama 3 and linear interpolation."""

import math

import torch

from kernels.model_config import ModelConfig, RopeScaling


class RotaryTables:
    """cos and sin [num_positions, head_dim / 2] in float32: one pair, or another one for layers with a window."""

    def __init__(self, config: ModelConfig, num_positions: int, device: torch.device | str = "cpu") -> None:
        frequencies = [inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)]
        self.kinds = [0] * config.num_layers
        """The index into `pairs` of each layer's pair."""
        if config.local_rope_theta is not None:
            frequencies.append(inverse_frequencies(config.head_dim, config.local_rope_theta, None))
            self.kinds = [int(config.window(idx) is not None) for idx in range(config.num_layers)]
        self.pairs = [_tables(each, num_positions, device) for each in frequencies]

    def of(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's cos and sin, each [num_positions, head_dim / 2] float32."""
        return self.pairs[self.kinds[layer_idx]]


def _tables(
    frequencies: torch.Tensor, num_positions: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Return [head_dim / 2] float32: the angle by which each pair of a head rotates per position.

    Raises ValueError for a kind of scaling other than llama3 and linear.
    """
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
