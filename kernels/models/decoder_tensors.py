"""Checkpoint tensors on their way into a decoder."""

from collections.abc import Mapping

import torch

from kernels.ops.linear.portable import Linear, make_linear


class DecoderTensors:
    """On the decoder's device and in its type, converted as they are asked for; each is asked for once."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        *,
        quantized: bool,
    ) -> None:
        self._weights, self._device, self._dtype = weights, device, dtype
        self._quantized = quantized

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name].to(self._device, self._dtype)

    def wide(self, name: str) -> torch.Tensor:
        """In float32, whatever the decoder's type."""
        return self._weights[name].to(self._device, torch.float32)

    def linear(self, prefix: str, *names: str, bias: bool = False) -> Linear:
        """One layer that gives the outputs of all `names`, one after the other."""
        weight = torch.cat([self[f"{prefix}{name}.weight"] for name in names])
        offset = torch.cat([self[f"{prefix}{name}.bias"] for name in names]) if bias else None
        return make_linear(weight, offset, quantized=self._quantized)

    def head(self, embedding: torch.Tensor, *, tied: bool) -> Linear:
        return make_linear(embedding if tied else self["lm_head.weight"], quantized=self._quantized)
