import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up, [num_tokens, intermediate], of gate_up [num_tokens, 2 * intermediate], any float type."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) · up of gate_up [num_tokens, 2 * intermediate], tanh form, in its type as in transformers."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
