"""Uploads, padding, buckets and the pool: what brings a step to the device."""

import pytest
import torch

from kernels.batch import ForwardBatch
from kernels.model_config import ModelConfig
from kernels.runtime.gpu import decode_graphs
from kernels.runtime.gpu.copies import ImmediateCopies
from kernels.runtime.gpu.decode_graphs import (
    BATCH_BUCKETS,
    MAX_GRAPHS,
    DecodeGraphs,
    empty_decode,
    pad_decode,
)
from kernels.runtime.gpu.kv_pool import GpuKVPool
from kernels.runtime.gpu.read_back import ResultBuffers
from kernels.runtime.gpu.step_inputs import StepInputs, batch_tensors
from kernels.runtime.gpu.upload import NUM_BUFFERS, Staging
from tests.kernels.runtime.gpu.late import LateCopies

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


def staging() -> Staging:
    return Staging(CPU, ImmediateCopies())


def test_one_upload_carries_all_types_and_shapes() -> None:
    tensors = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.int32),
        "wide": torch.tensor([-1, 1 << 40]),
        "table": torch.arange(6, dtype=torch.int32).view(2, 3),
        "none": torch.empty(0, dtype=torch.int64),
        "real": torch.tensor([0.1], dtype=torch.float64),
    }
    uploads = staging()
    for name, tensor in uploads.upload(tensors).items():
        assert torch.equal(tensor, tensors[name]), name
        assert tensor.dtype == tensors[name].dtype
        assert tensor.numel() == 0 or tensor.data_ptr() % 16 == 0
    assert uploads.num_uploads == 1


def test_hazard_memory_made_in_inference_mode_is_written_outside_of_it() -> None:
    """The model uploads in inference mode, the sampler's masks do not, and both use the same buffers in turn."""
    uploads = staging()
    for turn in range(2 * NUM_BUFFERS + 1):
        with torch.inference_mode(turn <= NUM_BUFFERS):
            assert uploads.upload({"turn": torch.tensor([turn])})["turn"].tolist() == [turn]


def test_hazard_host_memory_is_not_written_while_its_copy_is_still_to_come() -> None:
    """Two steps begin before the first is waited for, with three uploads each; all arrive unchanged."""
    copies = LateCopies()
    uploads = Staging(CPU, copies)
    targets = [uploads.new_target(16) for _ in range(NUM_BUFFERS + 1)]
    values = [torch.tensor([i, -i]) for i in range(NUM_BUFFERS + 1)]
    for value, target in zip(values[:-1], targets, strict=False):
        uploads.upload({"value": value}, target)
    assert (copies.copied, copies.num_waits) == ([], 0), "no upload of two steps waits for the device"
    uploads.upload({"value": values[-1]}, targets[-1])
    assert copies.num_waits == 1, "one more has to wait for the first"
    copies.reach(NUM_BUFFERS + 1)
    assert [copied.view(torch.int64).tolist() for copied in copies.copied] == [v.tolist() for v in values]


def test_hazard_results_of_a_step_survive_the_next_ones() -> None:
    """Two steps in flight, then a third: each gets its own results, whenever it is read."""
    copies = LateCopies()
    buffers = ResultBuffers(copies)
    first, second = (buffers.fetch(torch.tensor([i], dtype=torch.int32)) for i in (1, 2))
    assert (first.is_done, second.is_done, copies.num_waits) == (False, False, 0)
    assert first.wait().tolist() == [1]
    third = buffers.fetch(torch.tensor([3, 4], dtype=torch.int32))
    assert (second.is_done, third.is_done, copies.num_waits) == (False, False, 1)
    assert third.wait().tolist() == [3, 4]
    assert second.is_done
    assert second.wait().tolist() == [2]
    assert first.wait().tolist() == [1]


def test_hazard_a_step_that_was_given_up_keeps_its_results() -> None:
    """The step was never waited for, and its memory is needed again."""
    buffers = ResultBuffers(LateCopies())
    first, _, third = (buffers.fetch(torch.tensor([i], dtype=torch.int32)) for i in range(1, 4))
    assert third.wait().tolist() == [3]
    assert first.wait().tolist() == [1]


def test_the_samplers_part_travels_with_the_models() -> None:
    inputs = StepInputs(CPU, 4)
    inputs.add({"seeds": torch.tensor([8, 9])})
    model = inputs.upload({"token_ids": torch.tensor([5])})
    assert model["token_ids"].tolist() == [5]
    assert inputs.take()["seeds"].tolist() == [8, 9]
    assert inputs.staging.num_uploads == 1
    assert inputs.take() == {}


def test_what_is_too_large_for_a_graphs_memory_has_a_copy_of_its_own() -> None:
    inputs = StepInputs(CPU, 4)
    target = inputs.staging.new_target(64)
    inputs.add({"seeds": torch.arange(100)})
    model = inputs.upload({"token_ids": torch.tensor([5])}, target)
    assert model["token_ids"].data_ptr() == target.data_ptr()
    assert torch.equal(inputs.take()["seeds"], torch.arange(100))
    assert inputs.staging.num_uploads == 2


def test_without_a_forward_pass_the_samplers_part_travels_alone() -> None:
    inputs = StepInputs(CPU, 4)
    inputs.add({"seeds": torch.tensor([8, 9])})
    assert inputs.take()["seeds"].tolist() == [8, 9]


def test_equal_shapes_keep_their_addresses_which_graphs_rely_on() -> None:
    """Addresses do not depend on what the sampler adds after them."""
    inputs = StepInputs(CPU, 4)
    target = inputs.staging.new_target(4096)
    uploads = []
    for num_rows in (3, 2):
        inputs.add({"seeds": torch.arange(9 * num_rows)})
        uploads.append(inputs.upload(batch_tensors(pad_decode(decode_batch(num_rows), 4, 8)), target))
    first, again = uploads
    assert {name: t.data_ptr() for name, t in first.items()} == {
        name: t.data_ptr() for name, t in again.items()
    }
    assert again["token_ids"].tolist() == [5, 6, 0, 0]


def test_padding_adds_rows_that_read_and_write_nothing() -> None:
    padded = pad_decode(decode_batch(2), 4, 5)
    assert padded.slot_mapping.tolist() == [16, 17, -1, -1]
    assert padded.context_lens.tolist() == [8, 8, 0, 0]
    assert padded.block_tables.shape == (4, 5)
    assert padded.block_tables.dtype == torch.int32
    assert padded.num_decode_rows == 4
    assert pad_decode(empty_decode(), 1, 1).context_lens.tolist() == [0]


class Recorder:
    """Replaces the model's forward pass; records the shapes it is called with."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        self.shapes.append((batch.block_tables.shape[0], batch.block_tables.shape[1]))
        return batch.token_ids.float().unsqueeze(1)


def test_shapes_depend_on_the_bucket_alone() -> None:
    run = Recorder()
    graphs = DecodeGraphs(run, StepInputs(CPU, 4), block_size=16)
    for num_rows, width in ((3, 1), (4, 64), (5, 65), (256, 2), (1, 257)):
        logits = graphs.forward(decode_batch(num_rows, width))
        assert logits[:, 0].tolist() == [5 + i for i in range(num_rows)]
    assert run.shapes == [(4, 64), (4, 64), (8, 256), (256, 64), (1, 1024)]


def test_warmup_captures_what_the_options_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches up to the largest and contexts up to the longest, the widest first; the shortest contexts if too many."""
    captured: list[tuple[int, int]] = []

    class Captured:
        def __init__(
            self, run: object, inputs: object, num_rows: int, num_blocks: int, capture: object
        ) -> None:
            captured.append((num_rows, num_blocks))

        def replay(self, batch: ForwardBatch) -> None:
            pass

    def captures(max_num_seqs: int, max_context_tokens: int) -> list[tuple[int, int]]:
        graphs = DecodeGraphs(Recorder(), StepInputs(CPU, max_num_seqs), block_size=16)
        monkeypatch.setattr(graphs, "_capture", object())
        captured.clear()
        graphs.warmup(max_context_tokens)
        return list(captured)

    monkeypatch.setattr(decode_graphs, "_Graph", Captured)
    assert captures(3, 1500) == [(4, 256), (2, 256), (1, 256), (4, 64), (2, 64), (1, 64)]
    assert captures(1, 1024) == [(1, 64)]
    assert captures(1, 1025) == [(1, 256), (1, 64)]
    many = captures(1000, 1 << 20)
    assert len(many) == MAX_GRAPHS
    assert many[0][1] == 64 * 4**4
    assert set(many) >= {(rows, 64) for rows in BATCH_BUCKETS}


def test_the_number_of_graphs_is_bounded_and_the_oldest_goes() -> None:
    graphs = DecodeGraphs(Recorder(), StepInputs(CPU, 4), block_size=1024)
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
