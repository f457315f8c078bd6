import pytest
import torch

from kernels.batch import ForwardBatch
from kernels.ops.paged_attention import portable
from kernels.ops.paged_attention.cpu import MAX_QUERIES
from kernels.ops.paged_attention.reference import paged_attention_reference
from ops.bench.cpu_calls import attend_row
from tests.kernels.ops.blocks import Layer, make_layer

# Weights are rounded to bfloat16 before they multiply the values.
TOLERANCE = {"atol": 1.5e-2, "rtol": 1.5e-2}


def _reference(query: torch.Tensor, layer: Layer, length: int, window: int | None = None) -> torch.Tensor:
    lens = torch.tensor([length], dtype=torch.int32)
    start = torch.tensor([0, query.shape[0]], dtype=torch.int32)
    scale = query.shape[2] ** -0.5
    return paged_attention_reference(
        query.float(), layer.keys, layer.values, layer.tables, start, lens, scale, window
    )


def _attend(query: torch.Tensor, layer: Layer, length: int, window: int | None = None) -> torch.Tensor:
    position = length - query.shape[0]
    return attend_row(query, layer.keys, layer.values, layer.tables[0].contiguous(), position, window).float()


def _queries(num_tokens: int, num_heads: int, head_dim: int) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, head_dim).bfloat16()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 257])
def test_decode_at_block_and_segment_edges(length: int) -> None:
    layer = make_layer([length], num_kv_heads=3, head_dim=64, block_size=32)
    query = _queries(1, 9, 64)
    torch.testing.assert_close(_attend(query, layer, length), _reference(query, layer, length), **TOLERANCE)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (9, 3), (8, 2), (7, 1), (16, 2), (50, 1)]
)
@pytest.mark.parametrize("head_dim", [16, 48, 80, 128])
def test_group_sizes_and_head_sizes(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    layer = make_layer([45], num_kv_heads, head_dim, block_size=16)
    num_tokens = min(3, max(1, MAX_QUERIES * num_kv_heads // num_heads))
    query = _queries(num_tokens, num_heads, head_dim)
    torch.testing.assert_close(_attend(query, layer, 45), _reference(query, layer, 45), **TOLERANCE)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("prefix", [0, 1, 31, 64, 130, 200])
def test_chunk_behind_a_prefix_sees_only_the_past(block_size: int, prefix: int) -> None:
    length = prefix + 11
    layer = make_layer([length], num_kv_heads=2, head_dim=32, block_size=block_size)
    query = _queries(11, 6, 32)
    torch.testing.assert_close(_attend(query, layer, length), _reference(query, layer, length), **TOLERANCE)


@pytest.mark.parametrize("window", [None, 3, 100])
def test_queries_on_both_sides_of_a_segments_edge(window: int | None) -> None:
    """Earlier queries see nothing of the second segment and must not touch the others' scratch."""
    layer = make_layer([142], num_kv_heads=2, head_dim=16, block_size=16)
    query = _queries(16, 6, 16)
    got = _attend(query, layer, 142, window)
    torch.testing.assert_close(got, _reference(query, layer, 142, window), **TOLERANCE)
    alone = [_attend(query[i : i + 1].contiguous(), layer, 127 + i, window)[0] for i in range(16)]
    assert torch.equal(got, torch.stack(alone))


@pytest.mark.parametrize("window", [1, 7, 32, 40, 500])
def test_sliding_window(window: int) -> None:
    layer = make_layer([300], num_kv_heads=2, head_dim=32, block_size=32)
    query = _queries(13, 4, 32)
    expected = _reference(query, layer, 300, window)
    torch.testing.assert_close(_attend(query, layer, 300, window), expected, **TOLERANCE)


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize(("block_size", "length"), [(16, 511), (16, 513), (32, 1100), (96, 800)])
def test_context_of_several_spans(block_size: int, length: int, window: int | None) -> None:
    layer = make_layer([length], num_kv_heads=1, head_dim=32, block_size=block_size)
    query = _queries(5, 3, 32)
    got = _attend(query, layer, length, window)
    torch.testing.assert_close(got, _reference(query, layer, length, window), **TOLERANCE)


def test_result_does_not_depend_on_how_a_prompt_is_chunked() -> None:
    layer = make_layer([48], num_kv_heads=1, head_dim=64, block_size=32)
    query = _queries(16, 3, 64)
    whole = _attend(query, layer, 48)
    parts = [
        _attend(query[first : first + 1].contiguous(), layer, 48 - 16 + first + 1).squeeze(0)
        for first in range(16)
    ]
    assert torch.equal(whole, torch.stack(parts))


def test_nan_of_a_key_reaches_its_row() -> None:
    layer = make_layer([40], num_kv_heads=1, head_dim=32, block_size=16)
    layer.keys[layer.tables[0, 1].long(), 0, 3, 5] = torch.nan
    assert _attend(_queries(1, 2, 32), layer, 40).isnan().all()


def test_overflowing_scores_end_in_nan_not_in_a_wrong_answer() -> None:
    layer = make_layer([20], num_kv_heads=1, head_dim=32, block_size=16)
    query = torch.full((1, 2, 32), torch.inf).bfloat16()
    assert _attend(query, layer, 20).isnan().all()


@pytest.mark.parametrize("window", [None, 20])
def test_portable_version_of_a_mixed_batch(window: int | None) -> None:
    lengths = [1, 40, 33, 70, 17]
    layer = make_layer(lengths, num_kv_heads=2, head_dim=32, block_size=16)
    num_queries = [1, 1, 1, 9, 17]
    start = torch.tensor([0, *num_queries]).cumsum(0).int()
    query = torch.randn(sum(num_queries), 6, 32).bfloat16()
    empty = torch.zeros(0, dtype=torch.int64)
    lens = torch.tensor(lengths, dtype=torch.int32)
    batch = ForwardBatch(empty, empty, empty, layer.tables, start, lens, empty, num_decode_rows=3)
    scale = 32**-0.5
    got = portable.paged_attention(
        query.float(), layer.keys.float(), layer.values.float(), batch, portable.Scores(scale, window)
    )
    expected = paged_attention_reference(
        query.float(), layer.keys, layer.values, layer.tables, start, lens, scale, window
    )
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
