"""Linear layers of the portable model: plain torch, oneDNN with re-ordered weights, or dynamic int8."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[num_tokens, num_inputs] -> [num_tokens, num_outputs] in the input's type."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, *, quantized: bool = False) -> Linear:
    """Return the fastest linear layer on this device for a weight [num_outputs, num_inputs], any float type.

    The layer maps [..., num_inputs] to [..., num_outputs] in the same type.
    """
    if quantized:
        return _Int8Linear(weight, bias)
    if (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return _OneDnnLinear(weight, bias)
    return _PlainLinear(weight, bias)


class _PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class _OneDnnLinear:
    """The weight is re-ordered once; F.linear would do it in every call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class _Int8Linear:
    """int8 weights with a scale per output; activations are quantized per token at each call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        wide = weight.float()
        scales = wide.abs().amax(1).clamp_min(1e-12) / 127
        self._codes = (wide / scales.unsqueeze(1)).round().to(torch.int8).t()
        self._scales = scales
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        # A row with NaN or infinity keeps a NaN scale, so that it is found in its logits.
        scales = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        codes = (wide / scales).round().nan_to_num(0, 0, 0).to(torch.int8)
        y = torch._int_mm(codes, self._codes).float() * (scales * self._scales)
        return (y if self._bias is None else y + self._bias).to(x.dtype)
