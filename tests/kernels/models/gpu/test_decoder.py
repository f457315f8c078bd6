"""The whole forward pass against transformers on tiny random models: interpreted here, compiled on a device."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kernels.batch import ForwardBatch
from kernels.loading import make_decoder
from kernels.model_config import ModelConfig
from kernels.models.gpu.decoder import GpuDecoderModel
from kernels.ops.gpu.jit import Kernel
from kernels.runtime.gpu import decode_graphs
from kernels.runtime.gpu.kv_pool import GpuKVPool
from kernels.runtime.kv_pool import KVPool
from kernels.tools.aot import _specialize
from kernels.tools.gpu_bench import RandomWeights
from kernels.weights.checkpoint import Checkpoint, open_checkpoint
from kernels.weights.source import ModelFormat, ModelSource
from tests.kernels.tiny import make_model, save

BLOCK_SIZE = 16
TABLES = ((3, 5, 7), (1, 2, 9), (4, 8, 6))
Build = Callable[[str], tuple[PreTrainedModel, Checkpoint]]


@pytest.fixture(autouse=True)
def _short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first bucket of 1 K tokens is mostly empty splits here, which the interpreter visits one by one."""
    monkeypatch.setattr(decode_graphs, "FIRST_CONTEXT_TOKENS", 64)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def made(family: str) -> tuple[PreTrainedModel, Checkpoint]:
        model = make_model(family)
        source = ModelSource(save(model, tmp_path / family), ModelFormat.HUGGING_FACE, family)
        return model, open_checkpoint(source, torch.float32)

    return made


def load(checkpoint: Checkpoint, device: torch.device) -> GpuDecoderModel:
    pool = GpuKVPool(checkpoint.config, 10, BLOCK_SIZE, torch.float32, device)
    # Slots that were never written must not matter.
    pool.blocks.fill_(torch.nan)
    return GpuDecoderModel(checkpoint.config, checkpoint.weights, pool, dtype=torch.float32)


def make_batch(tokens: Sequence[Sequence[int]], rows: Sequence[tuple[int, int, int]]) -> ForwardBatch:
    """(request, first position, end) for each row."""
    flat, positions, slots, starts = [], [], [], [0]
    for request, begin, end in rows:
        flat += tokens[request][begin:end]
        positions += range(begin, end)
        slots += [
            TABLES[request][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(begin, end)
        ]
        starts.append(len(flat))
    return ForwardBatch(
        token_ids=torch.tensor(flat),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor([TABLES[request] for request, _, _ in rows], dtype=torch.int32),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([end for _, _, end in rows], dtype=torch.int32),
        sample_indices=torch.tensor(starts[1:]) - 1,
        num_decode_rows=next((i for i, (_, begin, end) in enumerate(rows) if end - begin > 1), len(rows)),
    )


STEPS = (
    ((0, 0, 20), (1, 0, 37)),
    ((0, 20, 21), (1, 37, 45), (2, 0, 5)),
    ((0, 21, 22), (1, 45, 46), (2, 5, 6)),
)
"""Two prompts; a decoding row beside a chunk after a prefix and a new prompt; three decoding rows."""


@torch.inference_mode()
def check_family(model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device) -> None:
    random = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 199, (48,), generator=random).tolist() for _ in TABLES]
    expected = model(torch.tensor(tokens)).logits
    ours = load(checkpoint, device)
    for rows in STEPS:
        logits = ours.forward(make_batch(tokens, rows)).cpu()
        wanted = torch.stack([expected[request, end - 1] for request, _, end in rows])
        torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama3_rope", marks=pytest.mark.slow),
        pytest.param("mistral_window", marks=pytest.mark.slow),
        "qwen2",
        pytest.param("qwen3", marks=pytest.mark.slow),
        "gemma3",
    ],
)
def test_interpreted_forward_equals_transformers(family: str, build: Build) -> None:
    check_family(*build(family), torch.device("cpu"))


@torch.inference_mode()
def test_gemma_in_bfloat16_is_no_farther_from_exact_than_the_portable_decoder(tmp_path: Path) -> None:
    """Each rounds in different places; norm weights and the sum in a norm must stay float32 in both."""
    model = make_model("gemma3")
    source = ModelSource(save(model, tmp_path), ModelFormat.HUGGING_FACE, "gemma3")
    checkpoint = open_checkpoint(source, torch.bfloat16)
    config, dtype = checkpoint.config, torch.bfloat16
    tokens = [[(5 * j + 3) % 199 for j in range(30)]]
    batch = make_batch(tokens, ((0, 0, 30),))
    portable = make_decoder(
        config, checkpoint.weights, KVPool(config, 10, BLOCK_SIZE, dtype, torch.device("cpu")), dtype=dtype
    )
    pool = GpuKVPool(config, 10, BLOCK_SIZE, dtype, "cpu")
    ours = GpuDecoderModel(config, checkpoint.weights, pool, dtype=dtype).forward(batch)
    exact = model(torch.tensor(tokens)).logits[:, -1]
    assert (ours - exact).norm() < 1.2 * (portable.forward(batch) - exact).norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family",
    ["llama", "llama_tied", "llama3_rope", "mistral_window", "qwen2", "qwen3", "gemma3", "gemma3_rope"],
)
def test_compiled_forward_equals_transformers(family: str, build: Build, cuda_device: torch.device) -> None:
    check_family(*build(family), cuda_device)


SMALL = ModelConfig("llama", 1, 64, 96, 2, 1, 32, 199, 128, 1e-6, 10000.0)


def _small(device: torch.device) -> GpuDecoderModel:
    """One layer of random weights."""
    torch.manual_seed(0)
    pool = GpuKVPool(SMALL, 10, BLOCK_SIZE, torch.float32, device)
    pool.blocks.fill_(torch.nan)
    return GpuDecoderModel(SMALL, RandomWeights(SMALL, device, torch.float32), pool, dtype=torch.float32)


@torch.inference_mode()
def check_neighbours(model: GpuDecoderModel) -> None:
    tokens = [[(7 * i + 3 * j) % 199 for j in range(48)] for i in range(3)]
    for request in range(3):
        model.forward(make_batch(tokens, ((request, 0, 30),)))
    together = model.forward(make_batch(tokens, ((0, 30, 31), (1, 30, 31), (2, 30, 31)))).cpu().clone()
    for request in range(3):
        alone = model.forward(make_batch(tokens, ((request, 30, 31),))).cpu()
        # The matrices' rounding may depend on their number of rows; attention's may not.
        torch.testing.assert_close(alone[0], together[request], atol=1e-4, rtol=1e-4)


def test_a_padded_bucket_gives_each_row_what_it_gets_alone() -> None:
    """Three rows run in a bucket of four: the added row reads and writes nothing."""
    model = _small(torch.device("cpu"))
    check_neighbours(model)
    unused = model.kv_pool.blocks[:, :, 0]
    assert unused.isnan().all(), "block 0 belongs to nobody; padding wrote to it"


@pytest.mark.gpu
def test_graph_replays_equal_single_rows(cuda_device: torch.device) -> None:
    check_neighbours(_small(cuda_device))


def test_logits_of_fewer_rows_than_decode_are_the_wanted_ones() -> None:
    model = _small(torch.device("cpu"))
    tokens = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    batch = make_batch(tokens, ((0, 0, 1), (1, 0, 1), (2, 0, 1)))
    every = model.forward(batch).clone()
    from_two = ForwardBatch(
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        torch.tensor([0, 2]),
        batch.num_decode_rows,
    )
    torch.testing.assert_close(model.forward(from_two), every[[0, 2]])


def test_warmup_leaves_the_pool_alone() -> None:
    model = _small(torch.device("cpu"))
    model.warmup()
    assert model.kv_pool.blocks.isnan().all()


def test_warmup_asks_for_every_variant_that_a_step_may_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not compiled by then, including copies of blocks, is compiled while serving."""
    variants: set[tuple[str, str]] = set()

    def asked(self: Kernel, grid: tuple[int, ...], arguments: dict[str, object], **_: int) -> None:
        if 0 not in grid:
            variants.add((self.name, str(_specialize(self.compiled, arguments))))

    monkeypatch.setattr(Kernel, "launch", asked)
    model = _small(torch.device("cpu"))
    model.warmup()
    warm, tokens = set(variants), [list(range(48))] * 3
    for rows in (
        ((0, 0, 1),),
        ((0, 0, 16), (1, 3, 20)),
        ((0, 1, 2), (1, 4, 5), (2, 0, 17)),
        ((0, 1, 2), (1, 4, 5), (2, 40, 41)),
    ):
        model.forward(make_batch(tokens, rows))
    model.kv_pool.copy_blocks([(1, 2)])
    model.kv_pool.copy_blocks([(1, 2), (3, 4), (5, 6)])
    assert variants == warm
    assert {"block_copy_kernel", "decode_kernel", "prefill_kernel"} <= {name for name, _ in warm}
