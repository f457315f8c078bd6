"""What a step costs as context and output grow: memory touched, K/V read and memory kept, counted, not timed."""

import gc
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpreterBuilder

from kernels.loading import make_decoder, pool_shape
from kernels.model_config import ModelConfig
from kernels.models.cpu.decoder import FusedDecoder
from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.runtime.gpu.kv_pool import GpuKVPool
from kernels.runtime.kv_pool import KVPool, bytes_per_block
from kernels.runtime.model_runner import ModelRunner, PoolShape
from kernels.sampling.cpu.sampler import Sampler
from kernels.tools.checks.attention import AttentionCase, check_attention
from kernels.weights.layout import expected_shapes
from scheduler.plan import SamplingParams, ScheduledRow, StepPlan
from tests.support.configs import runner_options
from tests.support.cost import count_calls, kept_bytes, peak_bytes

CONFIG = ModelConfig("llama", 2, 64, 96, 4, 2, 16, 100, 4096, 1e-5, 10000.0)
BLOCK_SIZE = 16
CONTEXTS = (512, 1024, 2048, 4096)
SAMPLING = SamplingParams(seed=5, temperature=0.7, top_p=0.9, frequency_penalty=0.2, num_logprobs=2)
TYPES = ["float32"]
if cpu_kernels_supported():
    TYPES.append("bfloat16")


def make_runner(dtype: str) -> ModelRunner:
    """The portable path in float32, the compiled one in bfloat16."""
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) * 0.1 for name, shape in expected_shapes(CONFIG).items()}
    pool = KVPool(CONFIG, CONTEXTS[-1] // BLOCK_SIZE, BLOCK_SIZE, getattr(torch, dtype))
    model = make_decoder(CONFIG, weights, pool, dtype=pool.dtype, num_threads=1)
    assert isinstance(model, FusedDecoder) == (dtype == "bfloat16")
    shape = PoolShape(pool.num_blocks, BLOCK_SIZE, CONTEXTS[-1])
    return ModelRunner(
        model,
        shape,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        make_sampler=lambda: Sampler(CONFIG.vocab_size),
    )


def step_of(context_tokens: int, num_tokens: int = 1) -> StepPlan:
    """One row whose last token sees `context_tokens`, itself included."""
    first = context_tokens - num_tokens
    tokens = tuple(place % 90 for place in range(num_tokens))
    table = tuple(range(-(-context_tokens // BLOCK_SIZE)))
    history = ((1, 2, 3), (4,)) if context_tokens in CONTEXTS else None
    row = ScheduledRow("r", 0, tokens, first, table, SAMPLING, context_tokens - 3, history)
    return StepPlan(context_tokens, (row,))


def assert_affine(costs: Sequence[int], sizes: Sequence[int]) -> None:
    """Assert a constant cost plus the same cost for every further token."""
    rises = [
        (later - earlier) / (more - less)
        for (earlier, later), (less, more) in zip(pairwise(costs), pairwise(sizes), strict=True)
    ]
    assert rises[0] > 0
    assert rises == pytest.approx([rises[0]] * len(rises), rel=0.01), costs


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all inputs and outputs of torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        self.num_bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return result


@pytest.mark.parametrize("num_tokens", [1, 64], ids=["decode", "chunk"])
def test_memory_touched_by_a_step_is_linear_in_its_context(num_tokens: int) -> None:
    """Measured on the portable path, all of whose operations can be observed."""
    runner, costs = make_runner("float32"), []
    for context in CONTEXTS:
        with _Traffic() as traffic:
            runner.step(step_of(context, num_tokens))
        costs.append(traffic.num_bytes)
    assert_affine(costs, CONTEXTS)


@pytest.mark.parametrize("dtype", TYPES)
def test_python_of_a_step_does_not_grow_with_its_context(dtype: str) -> None:
    runner = make_runner(dtype)
    runner.step(step_of(CONTEXTS[0]))
    calls = [count_calls(runner.step, step_of(context)) for context in CONTEXTS]
    assert max(calls) <= 1.02 * min(calls), calls


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements that each load of an interpreted kernel reads."""
    counts: list[int] = []
    load = InterpreterBuilder.create_masked_load

    def counting(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        counts.append(int(mask.data.sum()))
        return load(builder, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting)
    return counts


@pytest.mark.parametrize("new_tokens", [1, 5], ids=["decode", "chunk"])
def test_kv_read_by_the_gpu_kernels_is_linear_in_the_context(new_tokens: int, loaded: list[int]) -> None:
    head_dim, kv_heads, costs = 16, 2, []
    contexts = (128, 256, 512)
    for context in contexts:
        loaded.clear()
        case = AttentionCase(head_dim, 4, kv_heads, BLOCK_SIZE, torch.float32, ((new_tokens, context),))
        check_attention(torch.device("cpu"), case)
        costs.append(sum(loaded))
    assert_affine(costs, contexts)
    kv_per_token = 2 * kv_heads * head_dim
    assert kv_per_token <= (costs[-1] - costs[0]) / (contexts[-1] - contexts[0]) <= 1.1 * kv_per_token


@pytest.mark.parametrize("dtype", TYPES)
def test_nothing_is_left_behind_by_a_hundred_steps(dtype: str) -> None:
    """A plan, a result or a row of logits that is kept would add at least 200 bytes per step."""
    runner = make_runner(dtype)

    def run(first: int, num_steps: int) -> None:
        for context in range(first, first + num_steps):
            runner.step(step_of(context))
        gc.collect()

    runner.step(step_of(512))
    tracemalloc.start()
    try:
        run(513, 200)
        early = peak_bytes(run, 713, 8)
        # Python and NumPy cache some freed objects of each size, at various times.
        kept = [kept_bytes(run, 721, 100) for _ in range(3)]
        late = peak_bytes(run, 713, 8)
    finally:
        tracemalloc.stop()
    assert min(kept) < 100 * 100, kept
    assert late < early + max(0, sum(kept)) + 4 * 1024, (early, late, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 32])
def test_pool_is_exact_to_the_block(dtype: torch.dtype, block_size: int) -> None:
    expected = 13 * bytes_per_block(CONFIG, block_size, dtype)
    on_cpu = KVPool(CONFIG, 13, block_size, dtype)
    assert sum(each.untyped_storage().nbytes() for each in (on_cpu.keys, on_cpu.values)) == expected
    on_gpu = GpuKVPool(CONFIG, 13, block_size, dtype, torch.device("meta"))
    assert on_gpu.blocks.untyped_storage().nbytes() == on_gpu.nbytes == on_cpu.nbytes == expected


@given(
    num_bytes=st.integers(1, 1 << 40),
    block_size=st.sampled_from([16, 32, 48]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_pool_takes_all_whole_blocks_of_its_bytes_and_never_more(
    num_bytes: int, block_size: int, dtype: torch.dtype
) -> None:
    block_bytes = bytes_per_block(CONFIG, block_size, dtype)
    options = runner_options("m", kv_cache_bytes=num_bytes + block_bytes, block_size=block_size)
    taken = pool_shape(options, CONFIG, dtype).num_blocks * block_bytes
    assert taken <= options.kv_cache_bytes < taken + block_bytes
