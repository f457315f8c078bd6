"""CUDA graphs of the decode step: one per bucket of batch size and context, captured when first needed.

A graph fixes addresses and grid sizes. Each has a staging buffer of its own as its input, and the grids come from
the bucket's shapes; kernels find out on the device how much of them is real.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from kernels.batch import ForwardBatch
from kernels.gpu.staged_batch import empty_decode, pad_decode, upload_batch
from kernels.gpu.staging import Staging

BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FIRST_CONTEXT_TOKENS = 1024
CONTEXT_GROWTH = 4
"""Context buckets are 1 K, 4 K, 16 K, …: at most three quarters of the attention grid ends at once."""
MAX_GRAPHS = 64
"""Oldest out: each keeps its launches and its logits, the intermediate memory is shared."""

Forward = Callable[[ForwardBatch], torch.Tensor]


class DecodeGraphs:
    """Runs decode batches through captured graphs; on a CPU the same padded batches run directly."""

    def __init__(self, run: Forward, device: torch.device, block_size: int) -> None:
        self._run = run
        self._device = device
        self._block_size = block_size
        self._graphs: OrderedDict[tuple[int, int], _Graph] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def max_batch(self) -> int:
        return BATCH_BUCKETS[-1]

    def warmup(self) -> None:
        """Capture every batch size at the shortest context, largest first so that the others fit its memory."""
        width = self._width(1)
        for num_rows in reversed(BATCH_BUCKETS if self._device.type == "cuda" else BATCH_BUCKETS[:1]):
            self._graph(num_rows, width).replay(empty_decode())

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [num_sampled, vocab_size]; valid until the next call."""
        num_rows = batch.context_lens.shape[0]
        bucket = next(size for size in BATCH_BUCKETS if size >= num_rows)
        logits = self._graph(bucket, self._width(batch.block_tables.shape[1])).replay(batch)
        if batch.sample_indices.shape[0] == num_rows:
            return logits[:num_rows]
        return logits[batch.sample_indices.to(self._device)]

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
            self._graphs[key] = _Graph(self._run, self._device, num_rows, num_blocks, self._pool)
        self._graphs.move_to_end(key)
        return self._graphs[key]


class _Graph:
    """One bucket's captured step."""

    def __init__(
        self,
        run: Forward,
        device: torch.device,
        num_rows: int,
        num_blocks: int,
        pool: Any,
    ) -> None:
        self._run = run
        self._shape = (num_rows, num_blocks)
        self._staging = Staging(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture(pool)

    def _capture(self, pool: Any) -> None:
        """`pool` is torch's handle of the memory that all graphs share; its type is private there."""
        # The first upload settles the staging buffer's size, hence the addresses that the graph will read.
        batch = upload_batch(self._staging, pad_decode(empty_decode(), *self._shape))
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch ships it without types
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Compiles what is not compiled yet: no compiler may run during the capture.
            self._run(batch)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._logits = self._run(batch)

    def replay(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of all rows of the bucket."""
        on_device = upload_batch(self._staging, pad_decode(batch, *self._shape))
        if self._graph is None:
            return self._run(on_device)
        self._graph.replay()
        return self._logits
