"""Divides a step's attention into tasks for the threads."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.models.cpu.step_layout import ITEM
from kernels.ops.paged_attention.cpu import ALL_SPANS, MAX_QUERIES, span_tokens
from kernels.ops.paged_attention.cpu_span import part_bytes

_TASKS_PER_THREAD = 4
"""With fewer tasks than this, threads wait for the last one to finish."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    items: npt.NDArray[np.void]
    """[num_items] ITEM, in the order of the rows"""
    merges: npt.NDArray[np.void]
    """[num_merges] ITEM: rows whose spans are items of their own"""
    num_parts: int
    heads_per_task: int


class AttentionPlanner:
    """Divides prompts into runs of queries and, where a step has too few tasks, rows into spans of keys.

    A plan holds for the layers with one window (0 for none): spans before the window are left out, because their parts
    stay unwritten and must not be merged. How a row is divided does not change a bit of its result.
    """

    def __init__(self, config: ModelConfig, block_size: int, num_threads: int) -> None:
        self._num_kv_heads = config.num_kv_heads
        self._group = config.num_heads // config.num_kv_heads
        self._queries_per_item = max(1, MAX_QUERIES // self._group)
        self._span_tokens = span_tokens.py_func(block_size)
        self._enough_tasks = _TASKS_PER_THREAD * num_threads
        self._part_bytes: int = part_bytes.py_func(self._queries_per_item * self._group, config.head_dim)

    @property
    def part_bytes(self) -> int:
        """Bytes of one span's unfinished output, for one item and KV head."""
        return self._part_bytes

    def plan(self, batch: ForwardBatch, window: int) -> AttentionWork:
        """Plan the attention of all tokens of a batch on the host, shaped as ForwardBatch says."""
        num_decodes = batch.num_decode_rows
        starts = batch.query_start.tolist()
        per_item = self._queries_per_item
        chunks = [
            (row, first, min(per_item, starts[row + 1] - starts[row] - first), ALL_SPANS, 0)
            for row in range(num_decodes, len(starts) - 1)
            for first in range(0, starts[row + 1] - starts[row], per_item)
        ]
        items = np.zeros(num_decodes + len(chunks), ITEM)
        decodes = items[:num_decodes]
        decodes["row"], decodes["count"], decodes["span"] = np.arange(num_decodes), 1, ALL_SPANS
        items[num_decodes:] = chunks
        return self._share(items, batch, window)

    def plan_sampled(self, batch: ForwardBatch, window: int) -> AttentionWork:
        """Plan the attention of the sampled tokens only, as `plan` does."""
        starts, indices = batch.query_start.numpy(), batch.sample_indices.numpy()
        items = np.zeros(len(indices), ITEM)
        items["row"] = np.searchsorted(starts, indices, side="right") - 1
        items["first"] = indices - starts[items["row"]]
        items["count"], items["span"] = 1, ALL_SPANS
        return self._share(items, batch, window)

    def _share(self, items: npt.NDArray[np.void], batch: ForwardBatch, window: int) -> AttentionWork:
        if len(items) * self._num_kv_heads < self._enough_tasks:
            return self._split(items, batch, window)
        # With enough tasks a thread takes all heads of an item, so that it reads the item's blocks in one stream.
        whole_rows = len(items) >= 2 * self._enough_tasks
        return AttentionWork(items, items[:0], 0, self._num_kv_heads if whole_rows else 1)

    def _split(self, items: npt.NDArray[np.void], batch: ForwardBatch, window: int) -> AttentionWork:
        starts, context_lens = batch.query_start.tolist(), batch.context_lens.tolist()
        pieces: list[tuple[int, ...]] = []
        merges: list[tuple[int, ...]] = []
        num_parts = 0
        for row, first, count, _, _ in items.tolist():
            position = context_lens[row] - (starts[row + 1] - starts[row]) + first
            seen_from = max(0, position - window + 1) if window else 0
            spans = range(seen_from // self._span_tokens, -(-(position + count) // self._span_tokens))
            if len(spans) == 1:
                pieces.append((row, first, count, ALL_SPANS, 0))
                continue
            merges.append((row, first, count, len(spans), num_parts))
            pieces += [(row, first, count, span, num_parts + index) for index, span in enumerate(spans)]
            num_parts += len(spans)
        return AttentionWork(np.array(pieces, ITEM), np.array(merges, ITEM), num_parts, 1)
