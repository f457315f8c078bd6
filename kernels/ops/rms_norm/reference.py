import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., hidden] over the root of its mean square, times weight [hidden], in x's type.

    Computed in float32, and rounded before a weight of x's type multiplies but after a float32 one.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (wide * scale * weight).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)
