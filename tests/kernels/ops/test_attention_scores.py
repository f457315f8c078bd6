"""Chunks, soft-capping and sinks of the portable paged attention against the same in dense float64."""

import pytest
import torch

from kernels.batch import ForwardBatch
from kernels.ops.paged_attention.portable import Scores, paged_attention
from kernels.ops.paged_attention.reference import gather_kv
from tests.kernels.ops.blocks import Layer, make_layer

NUM_QUERIES = (1, 1, 1, 9, 17)
LENGTHS = (1, 33, 64, 40, 17)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 3, 32


def _dense(query: torch.Tensor, layer: Layer, row: int, scores: Scores) -> torch.Tensor:
    """One row, position by position."""
    key, value = (kv.double() for kv in gather_kv(layer.keys, layer.values, layer.tables[row], LENGTHS[row]))
    output = torch.empty_like(query, dtype=torch.float64)
    for idx in range(len(query)):
        position = LENGTHS[row] - len(query) + idx
        seen = [key_at for key_at in range(position + 1) if _sees(position, key_at, scores)]
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            weighed = key[kv_head, seen] @ query[idx, head].double() * scores.scale
            if scores.softcap is not None:
                weighed = scores.softcap * (weighed / scores.softcap).tanh()
            if scores.sinks is not None:
                weighed = torch.cat((weighed, scores.sinks[head : head + 1].double()))
            weights = weighed.softmax(0)[: len(seen)]
            output[idx, head] = weights @ value[kv_head, seen]
    return output


def _sees(query: int, key: int, scores: Scores) -> bool:
    in_window = scores.window is None or key > query - scores.window
    return in_window and (scores.chunk is None or key // scores.chunk == query // scores.chunk)


SINKS = torch.linspace(-1, 2, NUM_HEADS)


@pytest.mark.parametrize(
    "scores",
    [
        Scores(0.2),
        Scores(0.2, window=11),
        Scores(0.2, chunk=16),
        Scores(0.2, chunk=7),
        Scores(0.2, softcap=0.5),
        Scores(0.2, sinks=SINKS),
        Scores(0.3, window=20, softcap=1.5, sinks=SINKS),
        Scores(0.3, chunk=20, softcap=1.5),
    ],
)
def test_batch_equals_dense_attention(scores: Scores) -> None:
    """Blocks of other rows and memory after a row are poisoned, and must not be read."""
    layer = make_layer(list(LENGTHS), NUM_KV_HEADS, HEAD_DIM, block_size=16)
    start = torch.tensor([0, *NUM_QUERIES]).cumsum(0).int()
    query = torch.randn(sum(NUM_QUERIES), NUM_HEADS, HEAD_DIM)
    empty = torch.zeros(0, dtype=torch.int64)
    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    batch = ForwardBatch(empty, empty, empty, layer.tables, start, lens, empty, num_decode_rows=3)

    found = paged_attention(query, layer.keys.float(), layer.values.float(), batch, scores)

    for row, (first, last) in enumerate(zip(start.tolist(), start.tolist()[1:], strict=False)):
        expected = _dense(query[first:last], layer, row, scores)
        torch.testing.assert_close(found[first:last].double(), expected, atol=1e-5, rtol=1e-5)
