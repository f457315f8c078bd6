"""The Runner that computes: a model, its KV pool and the sampler, driven by plans."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.errors import OptionsError
from kernels.grammar import Grammars
from kernels.kv_pool import KVPool, bytes_per_block
from kernels.models.decoder import DecoderModel
from kernels.plan_buffers import PlanBuffers
from kernels.registry import ModelFormat, ModelSource
from kernels.runner import RunnerOptions
from kernels.sampling import Sampler
from kernels.weights import Checkpoint, open_checkpoint
from kernels.weights.hugging_face import is_native
from scheduler.plan import RowResult, SamplingParams, ScheduledRow, StepPlan, StepResult

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How the pool's bytes divide, and how long a request may grow in it."""

    num_blocks: int
    block_size: int
    max_model_len: int


class Pool(Protocol):
    """Paged keys and values on some device."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...


class Model(Protocol):
    """Bound to a KV pool; used by one thread at a time."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kv_pool(self) -> Pool: ...

    def warmup(self) -> None: ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Writes the batch's K/V into the pool and gives the logits [num_sampled, vocab_size] in float32."""
        ...


class TokenSampler(Protocol):
    """Chooses tokens from logits that stay where the model put them. Keeps state by seat."""

    def constrain_with(self, grammars: Grammars) -> None: ...

    def release(self, seats: Sequence[int]) -> None: ...

    def sample(self, logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> list[RowResult]: ...


class ModelRunner:
    """Built anywhere, then used on the step thread only."""

    def __init__(
        self,
        model: Model,
        shape: PoolShape,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        make_sampler: Callable[[], TokenSampler] | None = None,
    ) -> None:
        self._model = model
        self._shape = shape
        self._buffers = PlanBuffers(
            max_num_rows=max_num_seqs,
            max_num_tokens=max(max_num_batched_tokens, max_num_seqs),
            max_num_blocks=-(-shape.max_model_len // shape.block_size),
            block_size=shape.block_size,
        )
        self._make_sampler = make_sampler or (lambda: Sampler(model.config.vocab_size))
        self._sampler = self._make_sampler()

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def block_size(self) -> int:
        return self._shape.block_size

    @property
    def num_blocks(self) -> int:
        return self._shape.num_blocks

    @property
    def max_model_len(self) -> int:
        return self._shape.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._model.config.eos_token_ids

    @property
    def dtype(self) -> torch.dtype:
        return self._model.kv_pool.dtype

    @property
    def kv_cache_bytes(self) -> int:
        return self._model.kv_pool.nbytes

    def constrain_with(self, grammars: Grammars) -> None:
        self._sampler.constrain_with(grammars)

    def warmup(self) -> None:
        self._model.warmup()
        sampling = SamplingParams(seed=0, top_p=0.9, num_logprobs=1)
        row = ScheduledRow("warmup", 0, (0,), 0, (0,), sampling, 0)
        logits = torch.zeros((1, self.vocab_size), device=self._model.kv_pool.device)
        self._make_sampler().sample(logits, [row])

    def step(self, plan: StepPlan) -> StepResult:
        """Sampled rows get a token or an error of their own; the pool of other rows is never touched."""
        started_s = time.perf_counter()
        self._sampler.release(plan.released_seats)
        self._buffers.release(plan.released_seats)
        if plan.block_copies:
            self._model.kv_pool.copy_blocks(plan.block_copies)
        results = self._compute(plan) if plan.rows else ()
        return StepResult(plan.step_id, results, time.perf_counter() - started_s)

    def _compute(self, plan: StepPlan) -> tuple[RowResult, ...]:
        batch = self._buffers.fill(plan)
        unknown = self._silence_unknown_tokens(plan.rows, batch)
        logits = self._model.forward(batch)
        sampled = [row for row in plan.rows if row.sampling is not None]
        drawn = iter(self._sampler.sample(logits, sampled))
        results = [RowResult(row.request_id) if row.sampling is None else next(drawn) for row in plan.rows]
        for idx, error in unknown.items():
            results[idx] = RowResult(plan.rows[idx].request_id, error=error)
        return tuple(results)

    def _silence_unknown_tokens(self, rows: Sequence[ScheduledRow], batch: ForwardBatch) -> dict[int, str]:
        """Errors by row; an id outside the vocabulary would otherwise fail the lookup of the whole batch."""
        lowest, highest = batch.token_ids.aminmax()
        if int(lowest) >= 0 and int(highest) < self.vocab_size:
            return {}
        outside = (batch.token_ids < 0) | (batch.token_ids >= self.vocab_size)
        batch.token_ids[outside] = 0
        return {
            idx: f"token {token_id} is outside the vocabulary of {self.vocab_size} tokens"
            for idx, row in enumerate(rows)
            for token_id in row.token_ids
            if not 0 <= token_id < self.vocab_size
        }


def load_model_runner(options: RunnerOptions, source: ModelSource) -> ModelRunner:
    """Reads the checkpoint tensor by tensor into a model on the chosen device."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    if _chooses_gpu(options, source):
        dtype = _gpu_dtype(options)
        return load_on_gpu(options, open_checkpoint(source, dtype), dtype, torch.device("cuda"))
    device, dtype = torch.device("cpu"), _cpu_dtype(options)
    config, bind = _open_model(options, source, dtype, device)
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


def load_on_gpu(
    options: RunnerOptions, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> ModelRunner:
    """The same runner over Triton kernels. On a CPU device they are interpreted: for tests."""
    from kernels.gpu.decoder import GpuDecoderModel
    from kernels.gpu.kv_pool import GpuKVPool
    from kernels.gpu.sampler import GpuSampler

    config = checkpoint.config
    shape = pool_shape(options, config, dtype)
    try:
        pool = GpuKVPool(config, shape.num_blocks, shape.block_size, dtype, device)
        model = GpuDecoderModel(
            config, checkpoint.weights, pool, dtype=dtype, quantization=options.quantization
        )
    except ValueError as error:
        raise OptionsError(f"the model cannot run on {device}: {error}") from error
    return ModelRunner(
        model,
        shape,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        make_sampler=lambda: GpuSampler(config.vocab_size, options.max_num_seqs, device),
    )


def _open_model(
    options: RunnerOptions, source: ModelSource, dtype: torch.dtype, device: torch.device
) -> tuple[ModelConfig, Callable[[KVPool], Model]]:
    """The config that sizes the pool, and what makes the model of the pool."""
    if source.format is ModelFormat.HUGGING_FACE and not is_native(source.path):
        if options.quantization != "none":
            raise OptionsError(
                f"quantization is {options.quantization}; a model that runs through transformers takes only none"
            )
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
    elif source.format is ModelFormat.HUGGING_FACE and not is_native(source.path):
        missing = "models that run through transformers have no path there yet"
    elif open_checkpoint(source, torch.float32).config.gemma3 is not None:
        missing = "Gemma 3 has no path there yet"
    elif options.quantization != "none":
        missing = f"quantization {options.quantization} has no path there yet"
    if missing is not None and options.device == "cuda":
        raise OptionsError(f"device is cuda; {missing}; use cpu or auto")
    return missing is None


def _gpu_dtype(options: RunnerOptions) -> torch.dtype:
    return torch.bfloat16 if options.dtype == "auto" else _DTYPES[options.dtype]


def _cpu_dtype(options: RunnerOptions) -> torch.dtype:
    if options.dtype == "auto":
        return torch.bfloat16 if has_native_bfloat16() else torch.float32
    if options.dtype == "float16":
        raise OptionsError("dtype is float16; on the cpu use bfloat16, float32 or auto")
    return _DTYPES[options.dtype]


def has_native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself; emulated, it is slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
