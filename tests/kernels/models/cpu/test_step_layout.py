"""How attention is cut into tasks must cover every query once, and must not show in the result."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kernels.batch import ForwardBatch
from kernels.model_config import ModelConfig
from kernels.models.cpu.decoder import FusedDecoder
from kernels.models.cpu.packed_weights import layer_windows
from kernels.models.cpu.step_layout import AttentionPlanner
from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.ops.paged_attention.cpu import ALL_SPANS, MAX_QUERIES, span_tokens
from kernels.runtime.kv_pool import KVPool
from tests.kernels.models.cpu.test_fused import GEMMA3, SHAPES, make_batch, make_config, make_weights

BLOCK_SIZE = 16
SPAN = span_tokens.py_func(BLOCK_SIZE)
LONG_TABLE = tuple(range(100))


@pytest.fixture(autouse=True)
def _needs_cpu_kernels() -> None:
    if not cpu_kernels_supported():
        pytest.skip("this processor has no AVX-512 bfloat16 and int8 dot products")


def _planner(num_threads: int = 2) -> AttentionPlanner:
    return AttentionPlanner(make_config(max_position_embeddings=4096), BLOCK_SIZE, num_threads)


def _queries(items: np.ndarray) -> Counter[tuple[int, int]]:
    return Counter(
        (int(item["row"]), int(item["first"]) + index) for item in items for index in range(item["count"])
    )


def test_every_query_is_in_one_item() -> None:
    batch = make_batch([((1,), 3, 1), ((2,), 8, 1), (LONG_TABLE, 0, 37), (LONG_TABLE, 40, 150)])
    work = _planner().plan(batch, 0)
    expected = {(0, 0), (1, 0), *((2, i) for i in range(37)), *((3, i) for i in range(150))}
    assert _queries(work.items) == Counter(expected)
    assert work.items["count"].max() * 3 <= MAX_QUERIES
    assert len(work.merges) == 0


def test_lone_long_row_is_shared_out_span_by_span() -> None:
    work = _planner().plan(make_batch([(LONG_TABLE, 2 * SPAN + 5, 1)]), 0)
    assert work.items["span"].tolist() == [0, 1, 2]
    assert work.items["part"].tolist() == [0, 1, 2]
    assert work.merges.tolist() == [(0, 0, 1, 3, 0)]
    assert work.num_parts == 3


def test_row_within_one_span_is_left_whole() -> None:
    work = _planner().plan(make_batch([(LONG_TABLE, SPAN - 1, 1)]), 0)
    assert work.items["span"].tolist() == [ALL_SPANS]
    assert len(work.merges) == 0


def test_spans_before_the_window_are_left_out() -> None:
    work = _planner().plan(make_batch([(LONG_TABLE, 2 * SPAN + 5, 1)]), SPAN)
    assert work.items["span"].tolist() == [1, 2]


def test_sampled_tokens_alone() -> None:
    batch = make_batch([((1,), 3, 1), (LONG_TABLE, 0, 37), (LONG_TABLE, 40, 15)])
    assert _queries(_planner().plan_sampled(batch, 0).items) == Counter([(0, 0), (1, 36), (2, 14)])


def _decoder(config: ModelConfig, num_threads: int, pool: KVPool | None = None) -> FusedDecoder:
    if pool is None:
        pool = KVPool(config, 210, BLOCK_SIZE, torch.bfloat16)
        pool.keys.normal_(generator=torch.Generator().manual_seed(1))
        pool.values.normal_(generator=torch.Generator().manual_seed(2))
    return FusedDecoder(config, make_weights(config), pool, quantized=False, num_threads=num_threads)


GEMMA3_WINDOWS = (700, None, 20, None, 300)
"""Some layers see fewer spans than others, and the last one fewer than those before it."""


@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_windows": (700, 700)}, GEMMA3 | {"num_layers": 5, "layer_windows": GEMMA3_WINDOWS}],
    ids=["no_window", "window", "windows_by_layer"],
)
@pytest.mark.parametrize("num_queries", [1, 9])
def test_shared_out_row_has_the_bits_of_a_whole_one(changes: dict[str, object], num_queries: int) -> None:
    config = make_config(**changes, max_position_embeddings=4096)
    rows: Sequence[tuple[Sequence[int], int, int]] = [
        (LONG_TABLE, 3 * SPAN - 40, num_queries),
        (range(100, 200), SPAN + 3, num_queries),
    ]
    whole, shared = _decoder(config, 1), _decoder(config, 8)
    batch = make_batch(rows)
    assert len(_plan_of(whole, batch)) == 0
    assert len(_plan_of(shared, batch)) > 0
    assert torch.equal(whole.forward(batch), shared.forward(batch))


def _plan_of(decoder: FusedDecoder, batch: ForwardBatch) -> np.ndarray:
    planner = AttentionPlanner(decoder.config, BLOCK_SIZE, decoder.num_threads)
    return planner.plan(batch, layer_windows(decoder.config)[1]).merges


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_sampled_rows_have_the_bits_they_have_among_all_rows(shape: str) -> None:
    config = make_config(**SHAPES[shape])
    rows = [((5,), 3, 1), ((2, 9, 4), 0, 37), ((7, 3), 0, 16)]
    some, every = make_batch(rows), make_batch(rows, every_token=True)
    expected = _decoder(config, 2).forward(every)[some.sample_indices].clone()
    assert torch.equal(_decoder(config, 2).forward(some), expected)


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_keys_and_values_of_unsampled_rows_are_written_in_every_layer(shape: str) -> None:
    config = make_config(**SHAPES[shape])
    batch = make_batch([((2, 9, 4), 0, 37)], every_token=True)
    every, none = _decoder(config, 2), _decoder(config, 2)
    every.forward(batch)
    unsampled = make_batch([((2, 9, 4), 0, 37)])
    none.forward(
        ForwardBatch(
            unsampled.token_ids,
            unsampled.positions,
            unsampled.slot_mapping,
            unsampled.block_tables,
            unsampled.query_start,
            unsampled.context_lens,
            unsampled.sample_indices[:0],
            0,
        )
    )
    assert torch.equal(every.kv_pool.keys, none.kv_pool.keys)
    assert torch.equal(every.kv_pool.values, none.kv_pool.values)
