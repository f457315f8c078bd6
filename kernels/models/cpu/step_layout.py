"""What the compiled step reads by address: records of int64, strides in bytes."""

import numpy as np

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
