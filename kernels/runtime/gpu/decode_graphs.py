"""CUDA graphs of the decode step: one per bucket of batch size and context.

A graph fixes addresses and grid sizes. Each has its own device memory of fixed size as input, and its grids follow from
the bucket's shapes; kernels find out on the device which rows are real and which tokens the previous step sampled.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.batch import ForwardBatch
from kernels.runtime.gpu.step_inputs import StepInputs, batch_tensors
from kernels.runtime.gpu.upload import num_staged_bytes

BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FIRST_CONTEXT_TOKENS = 1024
CONTEXT_GROWTH = 4
"""Context buckets are 1 K, 4 K, 16 K, …: wider ones upload larger block tables and hold more partial results."""
MAX_GRAPHS = 64
"""Captured before serving; others are captured when first needed and replace the least recently used. Each keeps its
launches and logits; intermediate memory is shared."""
SAMPLING_BYTES = 1024
"""Space per row for sampling inputs after a graph's own input, so that one copy uploads both. They take about 100
bytes; the rest is for biases and short histories. Longer ones are copied separately."""

Forward = Callable[[ForwardBatch], torch.Tensor]


class DecodeGraphs:
    """Runs decode batches through captured graphs; on a CPU the same padded batches run directly."""

    def __init__(self, run: Forward, inputs: StepInputs, block_size: int) -> None:
        self._run = run
        self._inputs = inputs
        self._device = device = inputs.device
        self._block_size = block_size
        self._graphs: OrderedDict[tuple[int, int], _Graph] = OrderedDict()
        self._capture = _Capture.on_device() if device.type == "cuda" else None

    @property
    def max_batch(self) -> int:
        return BATCH_BUCKETS[-1]

    def warmup(self, max_context_tokens: int = 1) -> None:
        """Capture what steps may need: every batch size up to the largest and every context up to this length.

        If these are too many, only the shortest contexts are captured. The largest graphs come first, so that the
        others fit into their memory.
        """
        for num_rows, width in reversed(self._shapes(max_context_tokens)[:MAX_GRAPHS]):
            self._graph(num_rows, width).replay(empty_decode())

    def _shapes(self, max_context_tokens: int) -> list[tuple[int, int]]:
        """(rows, blocks) of the buckets, by context. Without a device nothing is captured and one bucket is enough."""
        if self._capture is None:
            return [(BATCH_BUCKETS[0], self._width(1))]
        largest = next(
            size for size in BATCH_BUCKETS if size >= min(self._inputs.max_num_seqs, self.max_batch)
        )
        widest = self._width(-(-max_context_tokens // self._block_size))
        widths = [self._width(1)]
        while widths[-1] < widest:
            widths.append(widths[-1] * CONTEXT_GROWTH)
        return [(size, width) for width in widths for size in BATCH_BUCKETS if size <= largest]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch of decoding rows; return float32 logits [num_sampled, vocab_size], valid until the next call."""
        num_rows = batch.context_lens.shape[0]
        bucket = next(size for size in BATCH_BUCKETS if size >= num_rows)
        graph = self._graph(bucket, self._width(batch.block_tables.shape[1]))
        if batch.sample_indices.shape[0] == num_rows:
            return graph.replay(batch)[:num_rows]
        # A captured step computes every row's logits; the wanted indices are uploaded with the batch.
        return graph.replay(batch, batch.sample_indices)

    def _width(self, num_blocks: int) -> int:
        """Blocks of the smallest context bucket that holds `num_blocks`."""
        width = -(-FIRST_CONTEXT_TOKENS // self._block_size)
        while width < num_blocks:
            width *= CONTEXT_GROWTH
        return width

    def _graph(self, num_rows: int, num_blocks: int) -> "_Graph":
        key = (num_rows, num_blocks)
        if key not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS:
                self._graphs.popitem(last=False)
            self._graphs[key] = _Graph(self._run, self._inputs, num_rows, num_blocks, self._capture)
        self._graphs.move_to_end(key)
        return self._graphs[key]


@dataclass(frozen=True, slots=True)
class _Capture:
    """What all captures share. With a stream per capture, each would keep a cuBLAS workspace of 32 MiB."""

    stream: torch.cuda.Stream
    pool: Any
    """torch's handle of a memory pool; its type is private there"""

    @classmethod
    def on_device(cls) -> "_Capture":
        return cls(torch.cuda.Stream(), torch.cuda.graph_pool_handle())  # type: ignore[no-untyped-call]  # torch ships them without types

    def of(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a run; return its graph and its result [...] of any dtype, which every replay overwrites."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            # Compiles what is not compiled yet and lets cuBLAS choose and load kernels; a capture allows neither.
            run()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            given = run()
        return graph, given


class _Graph:
    """One bucket's captured step."""

    def __init__(
        self, run: Forward, inputs: StepInputs, num_rows: int, num_blocks: int, capture: _Capture | None
    ) -> None:
        self._run = run
        self._inputs = inputs
        self._shape = (num_rows, num_blocks)
        empty = pad_decode(empty_decode(), *self._shape)
        size = num_staged_bytes(batch_tensors(empty)) + num_rows * SAMPLING_BYTES
        self._target = inputs.staging.new_target(size)
        self._logits = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None
        if capture is not None:
            on_device = inputs.staging.upload(batch_tensors(empty), self._target)
            padded = ForwardBatch(**on_device, num_decode_rows=num_rows)
            self._graph, self._logits = capture.of(lambda: run(padded))

    def replay(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 logits [num_rows, vocab_size] of the bucket, or [n, vocab_size] of the `wanted` rows [n]."""
        tensors = batch_tensors(pad_decode(batch, *self._shape))
        if wanted is not None:
            tensors["wanted"] = wanted
        on_device = self._inputs.upload(tensors, self._target)
        chosen = on_device.pop("wanted", None)
        if self._graph is None:
            self._logits = self._run(ForwardBatch(**on_device, num_decode_rows=self._shape[0]))
        else:
            self._graph.replay()
        return self._logits if chosen is None else self._logits[chosen]


def pad_decode(batch: ForwardBatch, num_rows: int, num_blocks: int) -> ForwardBatch:
    """Pad a batch of decoding rows to `num_rows` rows and block tables of `num_blocks` blocks.

    Added rows have no context and slot_mapping -1: they read and write nothing, and their logits are meaningless. All
    rows sample, so that the shapes depend on the bucket only. All tensors keep their dtypes.
    """
    rows, width = batch.block_tables.shape
    tables = torch.zeros((num_rows, num_blocks), dtype=torch.int32)
    tables[:rows, :width] = batch.block_tables
    return ForwardBatch(
        token_ids=_extended(batch.token_ids, num_rows, 0),
        positions=_extended(batch.positions, num_rows, 0),
        slot_mapping=_extended(batch.slot_mapping, num_rows, -1),
        block_tables=tables,
        query_start=torch.arange(num_rows + 1, dtype=torch.int32),
        context_lens=_extended(batch.context_lens, num_rows, 0),
        sample_indices=torch.arange(num_rows, dtype=torch.int64),
        num_decode_rows=num_rows,
    )


def empty_decode() -> ForwardBatch:
    """Return a batch without rows: padded, it warms up a bucket without touching the pool."""
    return ForwardBatch(
        token_ids=torch.empty(0, dtype=torch.int64),
        positions=torch.empty(0, dtype=torch.int64),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        block_tables=torch.empty((0, 1), dtype=torch.int32),
        query_start=torch.zeros(1, dtype=torch.int32),
        context_lens=torch.empty(0, dtype=torch.int32),
        sample_indices=torch.empty(0, dtype=torch.int64),
        num_decode_rows=0,
    )


def _extended(values: torch.Tensor, size: int, fill: int) -> torch.Tensor:
    extended = torch.full((size,), fill, dtype=values.dtype)
    extended[: values.shape[0]] = values
    return extended
