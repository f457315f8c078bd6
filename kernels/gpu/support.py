"""What the GPU's decoder has no path for. Imports nothing that only machines with a GPU have."""

from importlib.util import find_spec

from kernels.config import ModelConfig
from kernels.runner import RunnerOptions

MAX_HEAD_DIM = 256
BLOCK_SIZE_STEP = 16


def missing_on_gpu(config: ModelConfig, options: RunnerOptions) -> str | None:
    """Why this model cannot run there with these options; None: it can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if options.quantization != "none":
        return f"quantization {options.quantization} has no path there yet"
    if config.head_dim % 2 or config.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {config.head_dim}; the kernels take even sizes up to {MAX_HEAD_DIM}"
    if options.block_size % BLOCK_SIZE_STEP:
        return f"block_size is {options.block_size}; the kernels take multiples of {BLOCK_SIZE_STEP}"
    return None
