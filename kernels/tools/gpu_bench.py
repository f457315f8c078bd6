"""`tailrace bench gpu`: what the device can do, measured, and how much of it the kernels reach.

Decode and attention are compared with the bandwidth of a large copy, prefill with the rate of a large matrix
product, both measured in the same run. Weights are random: times do not depend on them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from kernels.errors import OptionsError
from kernels.model_config import ModelConfig
from kernels.models.gpu.decoder import GpuDecoderModel
from kernels.runtime.gpu.kv_pool import GpuKVPool
from kernels.runtime.gpu.step_inputs import StepInputs
from kernels.tools.gpu_steps import measure_steps
from kernels.tools.timing import captured_median_s, median_s
from kernels.tools.workloads import BLOCK_SIZE, AttentionSizes, attention, decode_batch, sampling

LLAMA_8B = ModelConfig(
    model_type="llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)
"""The shape of Llama 3.1 8B."""


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """What is run; the defaults need about 40 GiB of device memory."""

    config: ModelConfig = LLAMA_8B
    dtype: torch.dtype = torch.bfloat16
    decode_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    decode_context: int = 1024
    attention: tuple[tuple[int, int], ...] = ((1, 8192), (8, 8192), (32, 8192), (1, 32768), (8, 32768))
    """(rows, context)"""
    prefill: tuple[tuple[int, int], ...] = ((1, 2048), (1, 8192), (4, 2048))
    """(rows, tokens of each)"""
    num_steps: int = 50
    """consecutive steps that are timed"""
    flushed_bytes: int = 512 << 20
    """read between two reads of the same K/V: several times what any L2 cache holds"""
    copy_bytes: int = 4 << 30
    matrix_size: int = 8192
    num_runs: int = 20


def run_here() -> dict[str, object]:
    """The benchmark on the current CUDA device. Raises OptionsError where there is none."""
    if not torch.cuda.is_available():
        raise OptionsError("bench gpu needs a CUDA device; torch finds none here")
    return run(torch.device("cuda", torch.cuda.current_device()))


def run(device: torch.device, sizes: BenchSizes | None = None) -> dict[str, object]:
    """All measurements as values for JSON. A share of 1.0 is the rate of the copy or the matrix product."""
    sizes = sizes or BenchSizes()
    bandwidth = copy_bandwidth(device, sizes)
    matrix_rate = matrix_flops(device, sizes)
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "copy_bytes_per_s": bandwidth,
        "matrix_flops_per_s": matrix_rate,
        "attention": [asdict(found) for found in _attention(device, sizes, bandwidth)],
        "sampling": [asdict(found) for found in _sampling(device, sizes)],
    }
    inputs = StepInputs(device, max(sizes.decode_batches))
    model = random_model(inputs, sizes)
    report["decode"] = [asdict(found) for found in _decode(model, sizes, bandwidth)]
    report["steps"] = [
        asdict(measure_steps(model, inputs, num_rows, sizes.decode_context, sizes.num_steps))
        for num_rows in sizes.decode_batches
    ]
    report["prefill"] = [asdict(found) for found in _prefill(model, sizes, matrix_rate)]
    return report


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of the report."""

    num_rows: int
    num_tokens: int
    """context for decode and attention, new tokens for prefill, vocabulary for sampling"""
    seconds: float
    tokens_per_s: float
    share: float | None
    """share of the measured bandwidth or matrix rate"""


def copy_bandwidth(device: torch.device, sizes: BenchSizes) -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.randint(1 << 30, (sizes.copy_bytes // 8,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    seconds = median_s(lambda: target.copy_(source), device, num_runs=sizes.num_runs)
    return sizes.copy_bytes / seconds


def matrix_flops(device: torch.device, sizes: BenchSizes) -> float:
    """Floating-point operations per second of a large square product in the model's type."""
    size = sizes.matrix_size
    a, b = (torch.randn(size, size, device=device).to(sizes.dtype) for _ in range(2))
    seconds = median_s(lambda: a @ b, device, num_runs=sizes.num_runs)
    return 2 * size**3 / seconds


def _attention(device: torch.device, sizes: BenchSizes, bandwidth: float) -> Iterator[Measured]:
    """Time a graph over several layers' K/V: a step reads each once, and one alone may fit the L2 cache."""
    c = sizes.config
    for num_rows, context in sizes.attention:
        shape = AttentionSizes(num_rows, 1, context, c.head_dim, c.num_heads, c.num_kv_heads)
        kv_bytes = shape.kv_bytes * sizes.dtype.itemsize // 2
        layers = [
            attention(shape, device, sizes.dtype) for _ in range(max(2, -(-sizes.flushed_bytes // kv_bytes)))
        ]
        seconds = captured_median_s(layers, device, num_runs=sizes.num_runs)
        yield Measured(num_rows, context, seconds, num_rows / seconds, kv_bytes / seconds / bandwidth)


def _sampling(device: torch.device, sizes: BenchSizes) -> Iterator[Measured]:
    for num_rows in sizes.decode_batches:
        workload = sampling(num_rows, sizes.config.vocab_size, device)
        seconds = captured_median_s([workload], device, num_runs=sizes.num_runs)
        yield Measured(num_rows, sizes.config.vocab_size, seconds, num_rows / seconds, None)


def _decode(model: GpuDecoderModel, sizes: BenchSizes, bandwidth: float) -> Iterator[Measured]:
    """Whole steps, the upload of the batch included; a step reads every weight and the rows' K/V once."""
    for num_rows in sizes.decode_batches:
        batch = decode_batch(num_rows, 1, sizes.decode_context, torch.device("cpu"))
        seconds = median_s(lambda batch=batch: model.forward(batch), model.device, num_runs=sizes.num_runs)  # type: ignore[misc]  # default binds the loop's value
        moved = model.weight_bytes + num_rows * sizes.decode_context * _kv_bytes_per_token(sizes)
        yield Measured(
            num_rows, sizes.decode_context, seconds, num_rows / seconds, moved / seconds / bandwidth
        )


def _prefill(model: GpuDecoderModel, sizes: BenchSizes, matrix_rate: float) -> Iterator[Measured]:
    c = sizes.config
    for num_rows, new_tokens in sizes.prefill:
        batch = decode_batch(num_rows, new_tokens, new_tokens, torch.device("cpu"))
        seconds = median_s(lambda batch=batch: model.forward(batch), model.device, num_runs=sizes.num_runs)  # type: ignore[misc]  # default binds the loop's value
        num_tokens = num_rows * new_tokens
        # The embedding is a lookup and the head sees one token per row: neither counts. Causal: half a square.
        matrices = 2 * model.layer_parameters * num_tokens
        scores = 2 * num_rows * new_tokens**2 * c.num_layers * c.num_heads * c.head_dim
        yield Measured(
            num_rows, new_tokens, seconds, num_tokens / seconds, (matrices + scores) / seconds / matrix_rate
        )


def _kv_bytes_per_token(sizes: BenchSizes) -> int:
    c = sizes.config
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * sizes.dtype.itemsize


def random_model(inputs: StepInputs, sizes: BenchSizes) -> GpuDecoderModel:
    """A model of the wanted shape, its pool just large enough for what is run."""
    device = inputs.device
    wanted = [batch * sizes.decode_context for batch in sizes.decode_batches]
    wanted += [num_rows * tokens for num_rows, tokens in sizes.prefill]
    num_blocks = -(-max(wanted) // BLOCK_SIZE) + max(sizes.decode_batches)
    pool = GpuKVPool(sizes.config, num_blocks, BLOCK_SIZE, sizes.dtype, device)
    return GpuDecoderModel(
        sizes.config,
        RandomWeights(sizes.config, device, sizes.dtype),
        pool,
        dtype=sizes.dtype,
        inputs=inputs,
    )


class RandomWeights(Mapping[str, torch.Tensor]):
    """Weights made when they are asked for, on the device: an 8B model never exists on the host."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._shapes = dict(_weight_shapes(config))

    def __getitem__(self, name: str) -> torch.Tensor:
        """Make the named weight, a matrix [num_outputs, num_inputs] or a norm [size]."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        return torch.randn(shape, device=self._device, dtype=self._dtype).mul_(shape[1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _weight_shapes(c: ModelConfig) -> Iterator[tuple[str, Sequence[int]]]:
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    yield "lm_head.weight", (c.vocab_size, c.hidden_size)
    yield "model.norm.weight", (c.hidden_size,)
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for layer_idx in range(c.num_layers):
        prefix = f"model.layers.{layer_idx}."
        yield prefix + "input_layernorm.weight", (c.hidden_size,)
        yield prefix + "post_attention_layernorm.weight", (c.hidden_size,)
        for name, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, c.hidden_size)
        yield prefix + "self_attn.o_proj.weight", (c.hidden_size, query)
        yield prefix + "mlp.gate_proj.weight", (c.intermediate_size, c.hidden_size)
        yield prefix + "mlp.up_proj.weight", (c.intermediate_size, c.hidden_size)
        yield prefix + "mlp.down_proj.weight", (c.hidden_size, c.intermediate_size)
