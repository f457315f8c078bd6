"""From plans to tokens through the product's runner, interpreted; and what only a GPU can show."""

import math
from pathlib import Path

import pytest
import torch

from kernels.loading import load_on_gpu
from kernels.models.gpu.decoder import GpuDecoderModel
from kernels.ops.store_kv.gpu import KVBlocks, Rotary, store_kv
from kernels.runtime.gpu import decode_graphs
from kernels.runtime.gpu.kv_pool import GpuKVPool
from kernels.runtime.kv_pool import bytes_per_block
from kernels.tools.checks.attention import AttentionCase, check_attention
from kernels.tools.gpu_bench import LLAMA_8B, RandomWeights
from kernels.weights.checkpoint import open_checkpoint
from kernels.weights.source import ModelFormat, ModelSource
from tests.kernels.driving import Driver, Generation
from tests.kernels.models.gpu.test_decoder import SMALL, make_batch
from tests.kernels.test_determinism_gpu import LENGTHS, check_attention_alone
from tests.kernels.tiny import make_model, reference_tokens, save
from tests.support.configs import runner_options

CPU = torch.device("cpu")


def check_greedy_tokens(folder: Path, device: torch.device, num_tokens: int) -> None:
    """Chunked prompts, mixed and pure decode steps, through ModelRunner; tokens equal those of transformers."""
    model = make_model("llama")
    checkpoint = open_checkpoint(
        ModelSource(save(model, folder), ModelFormat.HUGGING_FACE, "tiny"), torch.float32
    )
    options = runner_options(
        "tiny",
        block_size=16,
        kv_cache_bytes=12 * bytes_per_block(checkpoint.config, 16, torch.float32),
        max_num_seqs=4,
        max_model_len=96,
        max_num_batched_tokens=64,
    )
    runner = load_on_gpu(options, checkpoint, torch.float32, device)
    driver = Driver(runner, chunk_tokens=20)
    prompts = [[(11 * i + 7 * j) % 199 for j in range(length)] for i, length in enumerate((31, 3))]
    generations = [Generation(f"g{i}", prompt, num_tokens) for i, prompt in enumerate(prompts)]
    driver.add(*generations)
    while not all(generation.ended for generation in generations):
        driver.step()
    for generation in generations:
        assert generation.error is None
        assert generation.tokens == reference_tokens(model, generation.prompt, num_tokens)


def test_interpreted_greedy_tokens_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "FIRST_CONTEXT_TOKENS", 64)
    check_greedy_tokens(tmp_path, CPU, num_tokens=3)


@pytest.mark.gpu
def test_compiled_greedy_tokens_equal_transformers(tmp_path: Path, cuda_device: torch.device) -> None:
    check_greedy_tokens(tmp_path, cuda_device, num_tokens=40)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_kv_stays_near_the_exact_logits(kv_dtype: torch.dtype) -> None:
    tokens = [[(5 * j + 3) % 199 for j in range(30)]]
    logits = []
    for dtype in (torch.float32, kv_dtype):
        torch.manual_seed(0)
        pool = GpuKVPool(SMALL, 10, 16, dtype, CPU)
        model = GpuDecoderModel(SMALL, RandomWeights(SMALL, CPU, torch.float32), pool, dtype=torch.float32)
        logits.append(model.forward(make_batch(tokens, ((0, 0, 30),))).clone())
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.1


@pytest.mark.gpu
def test_hazard_offsets_beyond_32_bits(cuda_device: torch.device) -> None:
    """A pool of more than 2**31 elements: the last block's K/V must not land at a wrapped address."""
    head_dim, block_size = 256, 16
    num_blocks = 2**31 // (head_dim * block_size) + 2
    pool = [
        torch.zeros((num_blocks, 1, block_size, head_dim), dtype=torch.bfloat16, device=cuda_device)
        for _ in "kv"
    ]
    angles = torch.zeros(4, head_dim // 2, device=cuda_device)
    qkv = torch.ones(1, 3 * head_dim, dtype=torch.bfloat16, device=cuda_device)
    slot = torch.tensor([num_blocks * block_size - 1], device=cuda_device)
    position = torch.zeros(1, dtype=torch.int64, device=cuda_device)
    store_kv(qkv, position, slot, Rotary(angles.cos(), angles.sin()), KVBlocks(pool[0], pool[1]))
    assert (pool[0][-1, 0, -1] == 1).all()
    assert pool[0].count_nonzero() == head_dim


@pytest.mark.gpu
def test_attention_over_a_long_context(cuda_device: torch.device) -> None:
    """Thirty-three splits, reduced thirty-two at a time, and a long chunk after a long prefix."""
    rows = ((1, 8192 + 5), (1, 4096), (700, 5000))
    check_attention(cuda_device, AttentionCase(128, 32, 8, 16, torch.bfloat16, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
def test_attention_on_a_device_is_equal_to_the_bit_among_many(
    window: int | None, cuda_device: torch.device
) -> None:
    """More decoding rows than the variant for small batches takes."""
    rows = tuple((1, 7 + 31 * i) for i in range(40))
    check_attention_alone(cuda_device, (*rows, *LENGTHS[3:]), window, torch.bfloat16)


def test_the_benchmarks_model_is_the_8b_shape() -> None:
    shapes = RandomWeights(LLAMA_8B, CPU, torch.bfloat16)._shapes.values()
    matrices = sum(math.prod(shape) for shape in shapes)
    assert matrices == pytest.approx(8.03e9, rel=0.001)
