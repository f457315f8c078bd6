"""The compiled step against the portable decoders on the same random weights."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kernels.batch import ForwardBatch
from kernels.loading import make_decoder
from kernels.model_config import ModelConfig, RopeScaling
from kernels.models.cpu.decoder import FusedDecoder
from kernels.models.portable import PortableDecoder
from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.runtime.kv_pool import KVPool

BLOCK_SIZE = 16
NUM_BLOCKS = 24

Row = tuple[Sequence[int], int, int]
"""Block table, tokens computed before, tokens now."""


@pytest.fixture(autouse=True)
def _needs_cpu_kernels() -> None:
    if not cpu_kernels_supported():
        pytest.skip("this processor has no AVX-512")


def make_config(**changes: object) -> ModelConfig:
    base = {
        "model_type": "llama",
        "num_layers": 2,
        "hidden_size": 96,
        "intermediate_size": 112,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 199,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    return ModelConfig(**{**base, **changes})  # type: ignore[arg-type]


def make_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).bfloat16().float()

    def gains(size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    hidden, head_dim = config.hidden_size, config.head_dim
    attention, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    # What the layers add must not be negligible beside the embeddings, which Gemma 3 scales itself.
    embedding_scale = 8 if config.embedding_scale == 1.0 else 12 / hidden**0.5
    weights = {
        "model.embed_tokens.weight": random(config.vocab_size, hidden) * embedding_scale,
        "lm_head.weight": random(config.vocab_size, hidden),
        "model.norm.weight": gains(hidden),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        weights |= {
            prefix + "input_layernorm.weight": gains(hidden),
            prefix + "post_attention_layernorm.weight": gains(hidden),
            prefix + "self_attn.q_norm.weight": gains(head_dim),
            prefix + "self_attn.k_norm.weight": gains(head_dim),
            prefix + "self_attn.o_proj.weight": random(hidden, attention),
            prefix + "mlp.gate_proj.weight": random(config.intermediate_size, hidden),
            prefix + "mlp.up_proj.weight": random(config.intermediate_size, hidden),
            prefix + "mlp.down_proj.weight": random(hidden, config.intermediate_size),
        }
        if config.has_post_norms:
            for name in ("pre_feedforward", "post_feedforward"):
                weights[f"{prefix}{name}_layernorm.weight"] = gains(hidden)
        for name, size in (("q", attention), ("k", kv), ("v", kv)):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = random(size, hidden)
            weights[f"{prefix}self_attn.{name}_proj.bias"] = gains(size)
    return weights


def make_batch(rows: Sequence[Row], *, every_token: bool = False) -> ForwardBatch:
    """Token ids depend only on their position. Rows of one token must come first."""
    positions = torch.cat([torch.arange(before, before + count) for _, before, count in rows])
    slots = torch.cat(
        [
            torch.tensor(table)[torch.arange(before, before + count) // BLOCK_SIZE] * BLOCK_SIZE
            + torch.arange(before, before + count) % BLOCK_SIZE
            for table, before, count in rows
        ]
    )
    tables = torch.zeros(len(rows), max(len(table) for table, _, _ in rows), dtype=torch.int32)
    for index, (table, _, _) in enumerate(rows):
        tables[index, : len(table)] = torch.tensor(table)
    counts = torch.tensor([count for _, _, count in rows])
    ends = counts.cumsum(0)
    return ForwardBatch(
        token_ids=(positions * 37 + 11) % 199,
        positions=positions,
        slot_mapping=slots,
        block_tables=tables,
        query_start=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int(),
        context_lens=torch.tensor([before + count for _, before, count in rows], dtype=torch.int32),
        sample_indices=torch.arange(len(positions)) if every_token else ends - 1,
        num_decode_rows=sum(count == 1 for _, _, count in rows),
    )


def make_model(config: ModelConfig, quantization: str = "none", num_threads: int = 2) -> FusedDecoder:
    if not cpu_kernels_supported(quantized=quantization == "int8"):
        pytest.skip("this processor has no int8 dot products")
    pool = KVPool(config, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    model = make_decoder(
        config,
        make_weights(config),
        pool,
        dtype=torch.bfloat16,
        quantized=quantization == "int8",
        num_threads=num_threads,
    )
    assert isinstance(model, FusedDecoder)
    return model


WINDOWS = (10, 24, None, 7)
GEMMA3: dict[str, object] = {
    "model_type": "gemma3",
    "num_layers": 4,
    "hidden_size": 100,
    "qk_norm": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "layer_windows": WINDOWS,
    "local_rope_theta": 300.0,
    "attention_scale": 0.3,
    "embedding_scale": 10.0,
    "activation": "gelu_tanh",
    "has_post_norms": True,
    "has_float32_norms": True,
}
"""Windows shorter than the prompts, different by layer, and last; the root of the hidden size is exact in bfloat16."""
SHAPES: dict[str, dict[str, object]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_heads": 7, "num_kv_heads": 1, "hidden_size": 112},
    "no_groups": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 32},
    "wide_heads": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 48},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "rms_norm_eps": 1e-6},
    "window": {"layer_windows": (10, 10)},
    "odd_sizes": {"intermediate_size": 100, "hidden_size": 52, "vocab_size": 33},
    "gemma3": GEMMA3,
    "gemma3_head_64": GEMMA3
    | {
        "head_dim": 64,
        "num_heads": 4,
        "num_kv_heads": 1,
        "intermediate_size": 100,
        "attention_scale": 0.15,
    },
    "gemma3_head_256": GEMMA3
    | {
        "head_dim": 256,
        "num_heads": 2,
        "num_kv_heads": 1,
        "attention_scale": 0.07,
    },
    "gemma3_rope": GEMMA3 | {"rope_scaling": RopeScaling("linear", 8.0), "tie_word_embeddings": False},
}
ROWS: list[Row] = [((5,), 0, 1), ((2, 9, 4), 0, 37), ((7, 3), 0, 16)]


@pytest.fixture(params=SHAPES)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return make_config(**SHAPES[request.param])


def make_exact(config: ModelConfig) -> PortableDecoder:
    pool = KVPool(config, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
    weights, dtype = make_weights(config), torch.float32
    return PortableDecoder(config, weights, pool, dtype=dtype, quantized=False)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_logits_are_those_of_the_portable_decoder_in_float32(config: ModelConfig, quantization: str) -> None:
    batch = make_batch(ROWS, every_token=True)
    batch.token_ids.remainder_(config.vocab_size)
    expected, got = make_exact(config).forward(batch), make_model(config, quantization).forward(batch)
    error = (got - expected).norm() / expected.norm()
    assert error < (0.04 if quantization == "int8" else 0.015)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("shape", ["llama", "gemma3", "gemma3_head_256"])
def test_logits_do_not_depend_on_batch_chunks_or_threads(shape: str, quantization: str) -> None:
    config = make_config(**SHAPES[shape])
    alone = make_model(config, quantization, num_threads=1)
    expected = alone.forward(make_batch([((2, 9, 4), 0, 37)])).clone()
    model = make_model(config, quantization, num_threads=3)
    model.forward(make_batch([((11, 6), 0, 20), ((2, 9, 4), 0, 17)]))
    model.forward(make_batch([((11, 6), 20, 1), ((2, 9, 4), 17, 19)]))
    decoded = [((11, 6), 21, 1), ((2, 9, 4), 36, 1), ((8,), 0, 1)]
    assert torch.equal(model.forward(make_batch(decoded))[1], expected[0])


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_rows_may_be_sampled_twice_and_in_any_order(shape: str) -> None:
    model = make_model(make_config(**SHAPES[shape]))
    batch = make_batch(ROWS, every_token=True)
    every = model.forward(batch).clone()
    indices = torch.tensor([53, 7, 7, 0, 53, 30])
    for _ in range(2):
        assert torch.equal(model.forward(replace(batch, sample_indices=indices)), every[indices])


def test_more_rows_may_be_sampled_than_there_are_tokens() -> None:
    model, batch = make_model(make_config()), make_batch([((3,), 0, 1)])
    expected = model.forward(batch).clone()
    got = model.forward(replace(batch, sample_indices=torch.zeros(40, dtype=torch.int64)))
    assert torch.equal(got, expected.expand(40, -1))
    assert model._max_tokens == 40, "the step's buffers hold the last norm's rows too"


def test_many_rows_take_whole_rows_and_give_the_same() -> None:
    config = make_config()
    model = make_model(config)
    tables = [(block,) for block in range(20)]
    together = model.forward(make_batch([(table, 0, 1) for table in tables])).clone()
    assert torch.equal(model.forward(make_batch([(tables[3], 0, 1)]))[0], together[3])


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_nan_in_one_row_leaves_its_neighbours_alone(shape: str) -> None:
    config = make_config(**SHAPES[shape])
    clean, model = make_model(config), make_model(config)
    rows: list[Row] = [((5,), 9, 1), ((2,), 9, 1), ((7,), 9, 1)]
    for each in (clean, model):
        each.forward(make_batch([(table, 0, 9) for table, _, _ in rows]))
    expected = clean.forward(make_batch(rows)).clone()
    model.kv_pool.keys[0, 2, 0, 0, 3] = torch.nan
    got = model.forward(make_batch(rows))
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])


def test_buffers_grow_and_shrink_with_the_batch() -> None:
    model = make_model(make_config())
    small = make_batch([((1,), 0, 3)])
    expected = model.forward(small).clone()
    model.forward(make_batch([((2, 9, 4, 12, 15), 0, 80)], every_token=True))
    assert torch.equal(model.forward(small), expected)


def test_warmup_leaves_the_pool_as_it_is() -> None:
    model = make_model(make_config())
    model.kv_pool.keys.fill_(3.0)
    model.warmup()
    assert (model.kv_pool.keys == 3.0).all()


@pytest.mark.parametrize(
    "field", ["token_ids", "positions", "slot_mapping", "block_tables", "sample_indices"]
)
@pytest.mark.parametrize("value", [-1, 1_000_000])
def test_hazard_an_index_out_of_range_never_reaches_the_compiled_step(field: str, value: int) -> None:
    """The step works on raw memory, so this must not be an assert, which `python -O` leaves out."""
    batch = make_batch(ROWS)
    getattr(batch, field).view(-1)[0] = value
    with pytest.raises(IndexError, match=f"{field} from "):
        make_model(make_config()).forward(batch)
