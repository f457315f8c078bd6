"""Staging, padding, buckets and the pool: what carries a step to the device."""

import pytest
import torch

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.gpu.decode_graphs import BATCH_BUCKETS, MAX_GRAPHS, DecodeGraphs
from kernels.gpu.kv_pool import GpuKVPool
from kernels.gpu.staged_batch import empty_decode, pad_decode, upload_batch
from kernels.gpu.staging import Staging

CPU = torch.device("cpu")
CONFIG = ModelConfig("llama", 2, 64, 96, 4, 2, 64, 50, 128, 1e-6, 10000.0)


def decode_batch(num_rows: int, width: int = 2) -> ForwardBatch:
    ramp = torch.arange(num_rows)
    return ForwardBatch(
        token_ids=ramp + 5,
        positions=ramp + 7,
        slot_mapping=ramp + 16,
        block_tables=torch.ones((num_rows, width), dtype=torch.int32),
        query_start=torch.arange(num_rows + 1, dtype=torch.int32),
        context_lens=torch.full((num_rows,), 8, dtype=torch.int32),
        sample_indices=ramp,
        num_decode_rows=num_rows,
    )


def test_one_upload_carries_all_types_and_shapes() -> None:
    tensors = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.int32),
        "wide": torch.tensor([-1, 1 << 40]),
        "table": torch.arange(6, dtype=torch.int32).view(2, 3),
        "none": torch.empty(0, dtype=torch.int64),
        "real": torch.tensor([0.1], dtype=torch.float64),
    }
    for name, tensor in Staging(CPU, 256).upload(tensors).items():
        assert torch.equal(tensor, tensors[name]), name
        assert tensor.dtype == tensors[name].dtype
        assert tensor.numel() == 0 or tensor.data_ptr() % 16 == 0


def test_equal_shapes_keep_their_addresses_which_graphs_rely_on() -> None:
    staging = Staging(CPU)
    first = upload_batch(staging, pad_decode(decode_batch(3), 4, 8))
    again = upload_batch(staging, pad_decode(decode_batch(2), 4, 8))
    assert [t.data_ptr() for t in (first.token_ids, first.block_tables, first.context_lens)] == [
        t.data_ptr() for t in (again.token_ids, again.block_tables, again.context_lens)
    ]
    assert again.token_ids.tolist() == [5, 6, 0, 0]


def test_an_upload_beyond_the_capacity_grows_the_buffers() -> None:
    staging = Staging(CPU, 64)
    values = torch.arange(1000)
    assert torch.equal(staging.upload({"values": values})["values"], values)


def test_padding_adds_rows_that_read_and_write_nothing() -> None:
    padded = pad_decode(decode_batch(2), 4, 5)
    assert padded.slot_mapping.tolist() == [16, 17, -1, -1]
    assert padded.context_lens.tolist() == [8, 8, 0, 0]
    assert padded.block_tables.shape == (4, 5)
    assert padded.block_tables.dtype == torch.int32
    assert padded.num_decode_rows == 4
    assert pad_decode(empty_decode(), 1, 1).context_lens.tolist() == [0]


class Recorder:
    """Stands where the model's forward stands; keeps the shapes it was asked for."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        self.shapes.append((batch.block_tables.shape[0], batch.block_tables.shape[1]))
        return batch.token_ids.float().unsqueeze(1)


def test_shapes_depend_on_the_bucket_alone() -> None:
    run = Recorder()
    graphs = DecodeGraphs(run, CPU, block_size=16)
    for num_rows, width in ((3, 1), (4, 64), (5, 65), (256, 2), (1, 257)):
        logits = graphs.forward(decode_batch(num_rows, width))
        assert logits[:, 0].tolist() == [5 + i for i in range(num_rows)]
    assert run.shapes == [(4, 64), (4, 64), (8, 256), (256, 64), (1, 1024)]


def test_the_number_of_graphs_is_bounded_and_the_oldest_goes() -> None:
    graphs = DecodeGraphs(Recorder(), CPU, block_size=1024)
    shapes = [(rows, width) for width in (1, 4, 16, 64, 256, 1024) for rows in BATCH_BUCKETS]
    assert len(shapes) > MAX_GRAPHS
    for rows, width in shapes:
        graphs.forward(decode_batch(rows, width))
        assert len(graphs._graphs) <= MAX_GRAPHS
    assert list(graphs._graphs) == shapes[-MAX_GRAPHS:]


def test_block_copies_reach_every_layer() -> None:
    pool = GpuKVPool(CONFIG, 4, 16, torch.bfloat16, CPU)
    pool.blocks.copy_(torch.randn(pool.blocks.shape))
    expected = pool.blocks.clone()
    expected[:, :, 3], expected[:, :, 0] = pool.blocks[:, :, 1], pool.blocks[:, :, 2]
    pool.copy_blocks([(1, 3), (2, 0)])
    pool.copy_blocks([])
    assert torch.equal(pool.blocks, expected)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 8), (4, 24)])
def test_pool_names_the_size_that_it_refuses(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=r"num_blocks is 0|block_size is (8|24)"):
        GpuKVPool(CONFIG, num_blocks, block_size, torch.float32, CPU)
