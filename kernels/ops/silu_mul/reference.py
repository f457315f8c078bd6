import torch


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of gate_up [num_tokens, 2 * intermediate], gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
