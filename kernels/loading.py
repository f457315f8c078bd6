"""Loads a runner as options ask: finds device, files, dtype and pool size, then builds model and sampler."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec

import torch

from kernels.errors import OptionsError
from kernels.model_config import ModelConfig
from kernels.models.cpu.decoder import FusedDecoder, fused_supported
from kernels.models.portable import PortableDecoder
from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.ops.cpu.product_choice import choose_bf16_product
from kernels.runner import RunnerOptions
from kernels.runtime.gpu.copies import Copies
from kernels.runtime.kv_pool import KVPool, bytes_per_block
from kernels.runtime.model_runner import Model, ModelRunner, PoolShape
from kernels.sampling.cpu.sampler import Sampler
from kernels.weights.checkpoint import Checkpoint, open_checkpoint
from kernels.weights.hugging_face import open_config
from kernels.weights.source import ModelFormat, ModelSource, resolve_model

log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MAX_GPU_HEAD_DIM = 256
GPU_BLOCK_SIZE_STEP = 16


def load_runner(options: RunnerOptions) -> ModelRunner:
    """Read the model tensor by tensor and allocate its KV pool. Takes seconds: not for the event loop.

    Raises ModelNotFoundError, ModelFileError or OptionsError.
    """
    source = resolve_model(options.model)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    if _chooses_gpu(options, source):
        dtype = _gpu_dtype(options)
        return load_on_gpu(options, open_checkpoint(source, dtype), dtype, torch.device("cuda"))
    return _load_on_cpu(options, source)


def _load_on_cpu(options: RunnerOptions, source: ModelSource) -> ModelRunner:
    foreign = _foreign_field(source)
    device, dtype = torch.device("cpu"), _cpu_dtype(options, compiled=foreign is None)
    _choose_product(options, dtype)
    config, bind = _open_model(options, source, dtype, device, foreign)
    shape = pool_shape(options, config, dtype)
    try:
        pool = KVPool(config, shape.num_blocks, shape.block_size, dtype, device)
    except ValueError as error:
        raise OptionsError(f"the KV pool cannot be built: {error}") from error
    return ModelRunner(
        bind(pool),
        shape,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        make_sampler=lambda: Sampler(config.vocab_size),
    )


def _open_model(
    options: RunnerOptions, source: ModelSource, dtype: torch.dtype, device: torch.device, foreign: str | None
) -> tuple[ModelConfig, Callable[[KVPool], Model]]:
    """The config that sizes the pool, and a function from the pool to the model. foreign: see _foreign_field."""
    if foreign is not None:
        if options.quantization != "none":
            raise OptionsError(
                f"quantization is {options.quantization}; a model that runs through transformers ({foreign}) "
                "takes only none"
            )
        if open_config(source.path).is_native_family:
            log.warning("%s: %s; the model runs through transformers, slower", source.path, foreign)
        # Here, because importing transformers takes seconds.
        from kernels.models.transformers.loading import load_adapter

        adapter = load_adapter(source.path, dtype, device)
        return adapter.config, adapter.bind
    checkpoint = open_checkpoint(source, dtype)

    def bind(pool: KVPool) -> Model:
        return make_decoder(
            checkpoint.config,
            checkpoint.weights,
            pool,
            dtype=dtype,
            quantized=options.quantization == "int8",
            num_threads=options.num_threads,
        )

    return checkpoint.config, bind


def make_decoder(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    kv_pool: KVPool,
    *,
    dtype: torch.dtype,
    quantized: bool = False,
    num_threads: int | None = None,
) -> FusedDecoder | PortableDecoder:
    """Build a native family's decoder: one compiled call per step where processor and shapes allow it, else torch.

    weights: by Hugging Face name, matrices [num_outputs, num_inputs], norms and biases [size], any float type.
    """
    if fused_supported(config, kv_pool, dtype, quantized=quantized):
        return FusedDecoder(config, weights, kv_pool, quantized=quantized, num_threads=num_threads)
    return PortableDecoder(config, weights, kv_pool, dtype=dtype, quantized=quantized)


def load_on_gpu(
    options: RunnerOptions,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    copies: Copies | None = None,
) -> ModelRunner:
    """Load a runner over Triton kernels. On a CPU device they are interpreted, for tests, and `copies` may be delayed.

    Raises OptionsError if the model cannot run there or the pool is too small.
    """
    config = checkpoint.config
    missing = missing_on_gpu(config, options)
    if missing is not None:
        raise OptionsError(f"the model cannot run on {device}: {missing}")
    # Here, because these need triton, which only machines with a GPU must have.
    from kernels.models.gpu.decoder import GpuDecoderModel
    from kernels.runtime.gpu.kv_pool import GpuKVPool
    from kernels.runtime.gpu.step_inputs import StepInputs
    from kernels.sampling.gpu.sampler import GpuSampler

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


def _foreign_field(source: ModelSource) -> str | None:
    """Return why the model has to run through transformers; None where it need not."""
    return None if source.format is ModelFormat.GGUF else open_config(source.path).foreign_field


def pool_shape(options: RunnerOptions, config: ModelConfig, dtype: torch.dtype) -> PoolShape:
    """Return as many blocks as the bytes allow; a request may be as long as model and pool both allow.

    Raises OptionsError when the pool holds no block, or less than an explicit max_model_len asks for.
    """
    block_bytes = bytes_per_block(config, options.block_size, dtype)
    num_blocks = options.kv_cache_bytes // block_bytes
    if num_blocks < 1:
        raise OptionsError(
            f"kv_cache_bytes is {options.kv_cache_bytes}; "
            f"one block of {options.block_size} tokens takes {block_bytes}"
        )
    shape = PoolShape(
        num_blocks, options.block_size, min(config.max_position_embeddings, num_blocks * options.block_size)
    )
    wanted = options.max_model_len
    if wanted is None:
        return shape
    if wanted > config.max_position_embeddings:
        raise OptionsError(
            f"max_model_len is {wanted}; the model takes at most {config.max_position_embeddings} tokens"
        )
    if wanted > shape.max_model_len:
        needed = -(-wanted // options.block_size) * block_bytes
        raise OptionsError(
            f"max_model_len is {wanted}; kv_cache_bytes {options.kv_cache_bytes} holds {shape.max_model_len} "
            f"tokens (needed: {needed} bytes)"
        )
    return replace(shape, max_model_len=wanted)


def _chooses_gpu(options: RunnerOptions, source: ModelSource) -> bool:
    """`auto` takes a GPU for models that run there; `cuda` raises OptionsError with what is missing."""
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        return False
    missing = None
    if not torch.cuda.is_available():
        missing = "torch finds no usable CUDA device here"
    elif (foreign := _foreign_field(source)) is not None:
        missing = f"models that run through transformers ({foreign}) have no path there yet"
    else:
        missing = missing_on_gpu(open_checkpoint(source, torch.float32).config, options) or _too_old()
    if missing is not None and options.device == "cuda":
        raise OptionsError(f"device is cuda; {missing}; use cpu or auto")
    if missing is not None:
        log.warning("%s: %s; the model runs on the cpu although there is a GPU", source.path, missing)
    return missing is None


def missing_on_gpu(config: ModelConfig, options: RunnerOptions) -> str | None:
    """Return why this model cannot run on a GPU with these options; None: it can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if options.quantization != "none":
        return f"quantization {options.quantization} has no path there yet"
    if config.head_dim % 2 or config.head_dim > MAX_GPU_HEAD_DIM:
        return f"head_dim is {config.head_dim}; the kernels take even sizes up to {MAX_GPU_HEAD_DIM}"
    if options.block_size % GPU_BLOCK_SIZE_STEP:
        return f"block_size is {options.block_size}; the kernels take multiples of {GPU_BLOCK_SIZE_STEP}"
    return None


def _too_old() -> str | None:
    """Why the kernels do not compile for the current device: tensor cores before sm_80 have no bfloat16."""
    major, minor = torch.cuda.get_device_capability()
    return f"its compute capability is {major}.{minor}; the kernels need 8.0" if major < 8 else None


def _gpu_dtype(options: RunnerOptions) -> torch.dtype:
    return torch.bfloat16 if options.dtype == "auto" else _DTYPES[options.dtype]


def _cpu_dtype(options: RunnerOptions, *, compiled: bool) -> torch.dtype:
    if options.dtype == "auto":
        ours = compiled and cpu_kernels_supported(quantized=options.quantization == "int8")
        return torch.bfloat16 if ours or has_native_bfloat16() else torch.float32
    if options.dtype == "float16":
        raise OptionsError("dtype is float16; on the cpu use bfloat16, float32 or auto")
    return _DTYPES[options.dtype]


def _choose_product(options: RunnerOptions, dtype: torch.dtype) -> None:
    """Set how the compiled kernels multiply; auto measures only where a model of this type may run on them."""
    if options.bf16_product == "auto" and not (dtype == torch.bfloat16 and cpu_kernels_supported()):
        return
    try:
        choose_bf16_product(options.bf16_product)
    except ValueError as error:
        raise OptionsError(str(error)) from error


def has_native_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 natively; emulated, it is slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
