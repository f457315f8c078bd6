"""From options and a checkpoint to a runner on the device that fits: dtype, pool size, model, sampler."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from kernels.config import ModelConfig
from kernels.errors import OptionsError
from kernels.gpu.support import missing_on_gpu
from kernels.kv_pool import KVPool, bytes_per_block
from kernels.model_runner import Model, ModelRunner, PoolShape
from kernels.models.decoder import DecoderModel
from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.ops.cpu.product import Product, choose_product
from kernels.registry import ModelFormat, ModelSource
from kernels.runner import RunnerOptions
from kernels.weights import open_checkpoint
from kernels.weights.hugging_face import open_config

log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model_runner(options: RunnerOptions, source: ModelSource) -> ModelRunner:
    """Reads the checkpoint tensor by tensor into a model on the chosen device."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    if _chooses_gpu(options, source):
        from kernels.gpu.loading import load_on_gpu  # here, because only there triton is needed

        dtype = _gpu_dtype(options)
        return load_on_gpu(options, open_checkpoint(source, dtype), dtype, torch.device("cuda"))
    foreign = _foreign_field(source)
    device, dtype = torch.device("cpu"), _cpu_dtype(options, compiled=foreign is None)
    if options.bf16_product != "auto":
        _choose_product(options.bf16_product)
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
    )


def _open_model(
    options: RunnerOptions, source: ModelSource, dtype: torch.dtype, device: torch.device, foreign: str | None
) -> tuple[ModelConfig, Callable[[KVPool], Model]]:
    """The config that sizes the pool, and what makes the model of the pool; `foreign`: see _foreign_field."""
    if foreign is not None:
        if options.quantization != "none":
            raise OptionsError(
                f"quantization is {options.quantization}; a model that runs through transformers ({foreign}) "
                "takes only none"
            )
        if open_config(source.path).is_native_family:
            log.warning("%s: %s; the model runs through transformers, slower", source.path, foreign)
        from kernels.models.adapter_loading import load_adapter  # here, because transformers takes seconds

        adapter = load_adapter(source.path, dtype, device)
        return adapter.config, adapter.bind
    checkpoint = open_checkpoint(source, dtype)

    def bind(pool: KVPool) -> DecoderModel:
        return DecoderModel(
            checkpoint.config,
            checkpoint.weights,
            pool,
            dtype=dtype,
            quantization=options.quantization,
            num_threads=options.num_threads,
        )

    return checkpoint.config, bind


def _foreign_field(source: ModelSource) -> str | None:
    """Why the model has to run through transformers; None where it need not."""
    return None if source.format is ModelFormat.GGUF else open_config(source.path).foreign_field


def pool_shape(options: RunnerOptions, config: ModelConfig, dtype: torch.dtype) -> PoolShape:
    """As many blocks as the bytes allow; a request may be as long as model and pool both allow.

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
    """`auto` takes a GPU for what has a path there; `cuda` insists and says what is missing."""
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


def _too_old() -> str | None:
    """Why the kernels do not compile for the current device: tensor cores before sm_80 know no bfloat16."""
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


def _choose_product(name: str) -> None:
    try:
        choose_product(Product(name))
    except ValueError as error:
        raise OptionsError(str(error)) from error


def has_native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself; emulated, it is slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
