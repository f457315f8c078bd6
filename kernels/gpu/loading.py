"""From a checkpoint to the runner whose model and sampler share a device."""

import torch

from kernels.errors import OptionsError
from kernels.gpu.copies import Copies
from kernels.gpu.decoder import GpuDecoderModel
from kernels.gpu.kv_pool import GpuKVPool
from kernels.gpu.sampler import GpuSampler
from kernels.gpu.step_inputs import StepInputs
from kernels.gpu.support import missing_on_gpu
from kernels.model_loading import pool_shape
from kernels.model_runner import ModelRunner
from kernels.runner import RunnerOptions
from kernels.weights import Checkpoint


def load_on_gpu(
    options: RunnerOptions,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    copies: Copies | None = None,
) -> ModelRunner:
    """A runner over Triton kernels. On a CPU device they are interpreted, for tests, and `copies` may come late.

    Raises OptionsError.
    """
    config = checkpoint.config
    missing = missing_on_gpu(config, options)
    if missing is not None:
        raise OptionsError(f"the model cannot run on {device}: {missing}")
    shape = pool_shape(options, config, dtype)
    inputs = StepInputs(device, options.max_num_seqs, copies=copies)
    pool = GpuKVPool(config, shape.num_blocks, shape.block_size, dtype, device)
    model = GpuDecoderModel(
        config, checkpoint.weights, pool, dtype=dtype, inputs=inputs, max_model_len=shape.max_model_len
    )
    return ModelRunner(
        model,
        shape,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        make_sampler=lambda: GpuSampler(config.vocab_size, inputs),
    )
