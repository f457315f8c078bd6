"""The decoder on CPUs with bfloat16 dot products: packed weights, step buffers, one compiled call per step."""

from collections.abc import Mapping

import numpy as np
import torch

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.kv_pool import KVPool
from kernels.models import fused_step
from kernels.models.rope import rotary_tables
from kernels.ops.cpu.jit import cpu_kernels_supported
from kernels.ops.cpu.precompile import precompile
from kernels.ops.cpu.tasks import END_STAMP, PHASE_BYTES, START_STAMP
from kernels.ops.cpu.threads import run_on_threads
from kernels.ops.linear.cpu import TILE_BYTES, describe
from kernels.ops.linear.packing import PackedLinear, pack_gate_up, pack_linear
from kernels.ops.paged_attention.cpu import MAX_QUERIES, SEGMENT, scratch_bytes

_PROJECTIONS = "qkv"


def fused_supported(config: ModelConfig, kv_pool: KVPool, dtype: torch.dtype) -> bool:
    """Whether this processor and these shapes fit the compiled step."""
    return (
        dtype == torch.bfloat16
        and kv_pool.dtype == torch.bfloat16
        and kv_pool.keys.device.type == "cpu"
        and kv_pool.block_size <= SEGMENT
        and config.head_dim % 16 == 0
        and config.hidden_size % 4 == 0
        and config.intermediate_size % 4 == 0
        and cpu_kernels_supported()
    )


class FusedDecoder:
    """See DecoderModel, whose two methods it implements."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        kv_pool: KVPool,
        *,
        quantized: bool,
        num_threads: int | None,
    ) -> None:
        self.config = config
        self.kv_pool = kv_pool
        self._quantized = quantized
        self._num_threads = num_threads or torch.get_num_threads()
        self._packed: list[PackedLinear] = []
        self._norms: list[torch.Tensor] = []
        self._layers = np.zeros(config.num_layers, fused_step.LAYER)
        for index in range(config.num_layers):
            self._load_layer(weights, index)
        embedding = weights["model.embed_tokens.weight"]
        head = embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        self._packed.append(self._pack(head))
        self._embedding = embedding.to(torch.bfloat16).contiguous()
        self._linears = np.array([describe(linear) for linear in self._packed], np.int64)
        self._cos, self._sin = rotary_tables(config, config.max_position_embeddings)
        self._step = np.zeros(1, fused_step.STEP)
        self._buffers: dict[str, torch.Tensor] = {}
        self._compiled = False
        # Kept between steps: touching 12 MB of new pages for 64 rows would cost more than writing them.
        self._logits = torch.empty(0, config.vocab_size)
        self._max_tokens = 0
        self._describe_model(self._norm(weights["model.norm.weight"]))

    def _norm(self, weight: torch.Tensor | None) -> int:
        if weight is None:
            return 0
        self._norms.append(weight.float().contiguous())
        return self._norms[-1].data_ptr()

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return pack_linear(weight, bias, quantized=self._quantized)

    def _load_layer(self, weights: Mapping[str, torch.Tensor], index: int) -> None:
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        qkv = torch.cat([weights[f"{attention}{name}_proj.weight"] for name in _PROJECTIONS])
        bias = None
        if self.config.qkv_bias:
            bias = torch.cat([weights[f"{attention}{name}_proj.bias"] for name in _PROJECTIONS])
        self._packed += [
            self._pack(qkv, bias),
            self._pack(weights[attention + "o_proj.weight"]),
            pack_gate_up(
                weights[prefix + "mlp.gate_proj.weight"],
                weights[prefix + "mlp.up_proj.weight"],
                quantized=self._quantized,
            ),
            self._pack(weights[prefix + "mlp.down_proj.weight"]),
        ]
        self._layers[index] = (
            self._norm(weights[prefix + "input_layernorm.weight"]),
            self._norm(weights[prefix + "post_attention_layernorm.weight"]),
            self._norm(weights.get(attention + "q_norm.weight") if self.config.qk_norm else None),
            self._norm(weights.get(attention + "k_norm.weight") if self.config.qk_norm else None),
        )

    def _describe_model(self, final_norm: int) -> None:
        config, pool, step = self.config, self.kv_pool, self._step[0]
        group = config.num_heads // config.num_kv_heads
        wide = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        scratch_stride = max(scratch_bytes(group, config.head_dim), wide * 4, TILE_BYTES) // 64 * 64 + 4096
        num_counters = 1 + config.num_layers * fused_step.PHASES_PER_LAYER + fused_step.EXTRA_PHASES
        self._counters = np.zeros((num_counters, PHASE_BYTES // 8), np.int64)
        self._scratch = torch.zeros(self._num_threads * scratch_stride, dtype=torch.uint8)
        for name, value in {
            "layers": self._layers.ctypes.data,
            "linears": self._linears.ctypes.data,
            "embedding": self._embedding.data_ptr(),
            "final_norm": final_norm,
            "cos": self._cos.data_ptr(),
            "sin": self._sin.data_ptr(),
            "keys": pool.keys.data_ptr(),
            "values": pool.values.data_ptr(),
            "counters": self._counters.ctypes.data,
            "scratch": self._scratch.data_ptr(),
            "scratch_stride": scratch_stride,
            "num_layers": config.num_layers,
            "hidden": config.hidden_size,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate": config.intermediate_size,
            "block_size": pool.block_size,
            "window": config.sliding_window or 0,
            "quantized": int(self._quantized),
            "layer_kv_bytes": pool.keys[0].nbytes,
            "block_kv_bytes": pool.keys[0, 0].nbytes,
            "qkv_width": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim * 4,
            "logits_width": config.vocab_size * 4,
            "eps_bits": _bits(config.rms_norm_eps),
            "scale_bits": _bits(config.head_dim**-0.5),
        }.items():
            step[name] = value

    def _compile(self) -> None:
        precompile(fused_step.__name__, (*fused_step.UNITS, fused_step.work))
        for unit, name in zip(fused_step.UNITS, fused_step.UNIT_NAMES, strict=True):
            self._step[0][name] = unit.address
        self._compiled = True

    def _make_room(self, num_tokens: int) -> None:
        """Grow the step's buffers to `num_tokens` rows."""
        if num_tokens <= self._max_tokens:
            return
        self._max_tokens = num_tokens
        config = self.config
        attention = config.num_heads * config.head_dim
        widths = {
            "x": config.hidden_size * 4,
            "normed": config.hidden_size * 2,
            "qkv": attention * 4 + 2 * config.num_kv_heads * config.head_dim * 4,
            "query": attention * 2,
            "attended": attention * 2,
            "mid": config.intermediate_size * 2,
            "codes": max(attention, config.intermediate_size) if self._quantized else 0,
            "scales": max(linear.num_groups for linear in self._packed) * 4 if self._quantized else 0,
        }
        for name, width in widths.items():
            self._buffers[name] = torch.empty(num_tokens * width + 64, dtype=torch.uint8)
            self._step[0][name] = self._buffers[name].data_ptr()

    def warmup(self) -> None:
        empty = torch.zeros(0, dtype=torch.int64)
        start = torch.zeros(1, dtype=torch.int32)
        self.forward(ForwardBatch(empty, empty, empty, empty.view(0, 1), start, empty, empty, 0))

    @property
    def bytes_per_weight(self) -> int:
        return 1 if self._quantized else 2

    @property
    def num_threads(self) -> int:
        return self._num_threads

    def stamps(self) -> list[int]:
        """Time-stamp counter at the last step's start and at the end of each of its phases; 0 where it had none."""
        ends: list[int] = self._counters[:, END_STAMP // 8].tolist()
        return [int(self._counters[0, START_STAMP // 8]), *ends]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        num_tokens, num_sampled = batch.token_ids.shape[0], batch.sample_indices.shape[0]
        self._check(batch)
        self._make_room(num_tokens)
        if num_sampled > self._logits.shape[0]:
            self._logits = torch.empty(num_sampled, self.config.vocab_size, dtype=torch.float32)
        if not self._compiled:
            self._compile()
        tables = batch.block_tables.to(torch.int32).contiguous()
        items = self._items(batch)
        logits = self._logits[:num_sampled]
        step = self._step[0]
        step["num_tokens"], step["num_sampled"], step["num_items"] = num_tokens, num_sampled, len(items)
        step["table_stride"] = tables.shape[1] * 4
        inputs = {
            "token_ids": batch.token_ids.to(torch.int64).contiguous(),
            "positions": batch.positions.to(torch.int64).contiguous(),
            "slots": batch.slot_mapping.to(torch.int64).contiguous(),
            "tables": tables,
            "query_start": batch.query_start.to(torch.int32).contiguous(),
            "context_lens": batch.context_lens.to(torch.int32).contiguous(),
            "sample_indices": batch.sample_indices.to(torch.int64).contiguous(),
            "logits": logits,
        }
        for name, tensor in inputs.items():
            step[name] = tensor.data_ptr()
        step["items"] = items.ctypes.data
        # By NumPy: torch would wake its threads to clear 40 KB, and wait for them.
        self._counters.fill(0)
        step["num_started"] = 0
        run_on_threads(fused_step.work, self._step.ctypes.data, self._num_threads)
        return logits

    def _check(self, batch: ForwardBatch) -> None:
        """The compiled step reads and writes raw memory: an index out of range would corrupt it silently."""
        for indices, bound in (
            (batch.token_ids, self.config.vocab_size),
            (batch.positions, self._cos.shape[0]),
            (batch.slot_mapping, self.kv_pool.num_blocks * self.kv_pool.block_size),
            (batch.block_tables, self.kv_pool.num_blocks),
            (batch.sample_indices, batch.token_ids.shape[0]),
        ):
            if indices.numel():
                lowest, highest = indices.aminmax()
                assert int(lowest) >= 0, "negative index"
                assert int(highest) < bound, f"index {int(highest)} is not below {bound}"

    def _items(self, batch: ForwardBatch) -> np.ndarray:
        """Work for attention: (row, first query, number of queries) [num_items, 3] int32."""
        per_item = max(1, MAX_QUERIES * self.config.num_kv_heads // self.config.num_heads)
        num_decodes = batch.num_decode_rows
        lengths = batch.query_start.diff().tolist()
        items = [(row, 0, 1) for row in range(num_decodes)]
        for row in range(num_decodes, len(lengths)):
            length = lengths[row]
            items += [(row, first, min(per_item, length - first)) for first in range(0, length, per_item)]
        return np.array(items, np.int32).reshape(-1, 3)


def _bits(value: float) -> int:
    """The bits of a float32, as an integer."""
    return int(np.float32(value).view(np.uint32))
