"""What the compiled step reads by address (records of int64, strides in bytes), and how its attention becomes tasks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.batch import ForwardBatch
from kernels.model_config import ModelConfig
from kernels.ops.paged_attention.cpu import ALL_SPANS, MAX_QUERIES, span_tokens
from kernels.ops.paged_attention.cpu_span import part_bytes

_ADDRESSES = (
    "layers linears embedding token_ids positions slots tables query_start context_lens sample_indices last_work "
    "parts final_norm keys values x branch normed scales qkv query attended mid codes logits counters scratch"
)
_COMPILED = (
    "linear_phase",
    "rms_norm_phase",
    "add_norm_phase",
    "quantize_phase",
    "rotate_and_store_phase",
    "attend",
    "merge_parts",
)
_NUMBERS = (
    "num_layers hidden heads kv_heads head_dim intermediate block_size quantized activation eps_bits scale_bits "
    "embedding_scale_bits num_tokens num_sampled only_sampled part_stride table_stride layer_kv_bytes block_kv_bytes "
    "scratch_stride qkv_width logits_width"
)
STEP = np.dtype(
    [(name, np.int64) for name in ("num_started", *_ADDRESSES.split(), *_NUMBERS.split(), *_COMPILED)]
)
"""Everything a step reads and writes: a counter of threads, addresses, sizes (strides in bytes), compiled functions."""

_LAYER_FIELDS = (
    "input_norm post_attention_norm mlp_norm post_mlp_norm query_norm key_norm cos sin window work"
)
LAYER = np.dtype([(name, np.int64) for name in _LAYER_FIELDS.split()])
"""A layer's addresses, 0 where the model has none: float32 norm weights (the post-norms are applied to what attention
and the MLP give, before it is added), rotary tables, the window (0: all keys) and its WORK."""

ITEM = np.dtype([(name, np.int64) for name in ("row", "first", "count", "span", "part")])
"""Attention of `count` tokens of a row, starting with its `first` in this step: over all keys, or over one span of them
into a part. For a merge, `span` is the number of parts, which start at `part`."""

WORK = np.dtype(
    [(name, np.int64) for name in ("items", "num_items", "merges", "num_merges", "heads_per_task")]
)
"""A layer's attention: addresses and numbers of ITEMs, and how many KV heads a task takes."""


class StepFields:
    """One STEP. Fields are set by index into an array: NumPy's access by name takes several times as long."""

    def __init__(self) -> None:
        self._values = np.zeros(len(STEP.names or ()), np.int64)
        self._index = {name: index for index, name in enumerate(STEP.names or ())}
        self.address: int = self._values.ctypes.data

    def set(self, name: str, value: int) -> None:
        self._values[self._index[name]] = value


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
