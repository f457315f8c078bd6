"""The decoder on CPUs with AVX-512: step buffers, plans of attention, one compiled call per step."""

from collections.abc import Mapping

import numpy as np
import torch

from kernels.batch import ForwardBatch
from kernels.memory import Arena
from kernels.model_config import ModelConfig
from kernels.models.cpu import fused_step
from kernels.models.cpu.packed_weights import PackedWeights, layer_windows
from kernels.models.cpu.step_layout import WORK, AttentionPlanner, AttentionWork, StepFields
from kernels.models.decoder_weights import rounded_embedding_scale
from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.ops.cpu.precompile import precompile
from kernels.ops.cpu.tasks import END_STAMP, PHASE_BYTES, START_STAMP
from kernels.ops.linear import cpu as linear_kernel
from kernels.ops.linear.cpu import GELU_MUL, SILU_MUL
from kernels.ops.paged_attention.cpu import scratch_bytes
from kernels.ops.paged_attention.cpu_span import SEGMENT
from kernels.runtime.kv_pool import KVPool


def fused_supported(
    config: ModelConfig, kv_pool: KVPool, dtype: torch.dtype, *, quantized: bool = False
) -> bool:
    """Whether this processor and these shapes fit the compiled step."""
    return (
        dtype == torch.bfloat16
        and kv_pool.dtype == torch.bfloat16
        and kv_pool.keys.device.type == "cpu"
        and kv_pool.block_size <= SEGMENT
        and config.head_dim % 16 == 0
        and config.hidden_size % 4 == 0
        and config.intermediate_size % 4 == 0
        and cpu_kernels_supported(quantized=quantized)
    )


class FusedDecoder:
    """A decoder with its weights, bound to one KV pool. Used by one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        kv_pool: KVPool,
        *,
        quantized: bool,
        num_threads: int | None,
    ) -> None:
        """weights: by Hugging Face name, matrices [num_outputs, num_inputs], norms and biases [size], any float type.

        num_threads: None for torch's number.
        """
        self.config = config
        self.kv_pool = kv_pool
        self._quantized = quantized
        self._num_threads = num_threads or torch.get_num_threads()
        self._weights = PackedWeights(config, weights, quantized=quantized)
        self._step = StepFields()
        self._buffers: dict[str, torch.Tensor] = {}
        self._compiled = False
        windows = layer_windows(config)
        self._windows = tuple(dict.fromkeys(windows))
        self._last_window = windows[-1]
        self._work = np.zeros(len(self._windows) + 1, WORK)
        """One record per window, and one for the last layer when only sampled rows are computed there."""
        self._weights.layers["work"] = [
            self._work[self._windows.index(window) :].ctypes.data for window in windows
        ]
        self._attention = AttentionPlanner(config, kv_pool.block_size, self._num_threads)
        self._parts = torch.empty(0, dtype=torch.uint8)
        # Kept between steps: page faults for 12 MB of new logits (64 rows) would cost more than writing them.
        self._logits = torch.empty(0, config.vocab_size)
        self._max_tokens = 0
        self._describe_model()

    def _describe_model(self) -> None:
        config, pool, weights = self.config, self.kv_pool, self._weights
        group = config.num_heads // config.num_kv_heads
        wide = max(2 * config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        scratch = max(scratch_bytes(group, config.head_dim), wide * 4, linear_kernel.scratch_bytes(wide))
        scratch_stride = scratch // 64 * 64 + 4096
        num_counters = 1 + config.num_layers * fused_step.PHASES_PER_LAYER + fused_step.EXTRA_PHASES
        self._counters = np.zeros((num_counters, PHASE_BYTES // 8), np.int64)
        self._scratch = torch.zeros(self._num_threads * scratch_stride, dtype=torch.uint8)
        for name, value in {
            "layers": weights.layers.ctypes.data,
            "last_work": self._work[-1:].ctypes.data,
            "linears": weights.linears.ctypes.data,
            "embedding": weights.embedding.data_ptr(),
            "final_norm": weights.final_norm,
            "keys": pool.keys.data_ptr(),
            "values": pool.values.data_ptr(),
            "counters": self._counters.ctypes.data,
            "scratch": self._scratch.data_ptr(),
            "scratch_stride": scratch_stride,
            "part_stride": self._attention.part_bytes,
            "num_layers": config.num_layers,
            "hidden": config.hidden_size,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate": config.intermediate_size,
            "block_size": pool.block_size,
            "quantized": int(self._quantized),
            "activation": SILU_MUL if config.activation == "silu" else GELU_MUL,
            "layer_kv_bytes": pool.keys[0].nbytes,
            "block_kv_bytes": pool.keys[0, 0].nbytes,
            "qkv_width": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim * 4,
            "logits_width": config.vocab_size * 4,
            "eps_bits": _bits(config.rms_norm_eps),
            "scale_bits": _bits(config.score_scale),
            "embedding_scale_bits": _bits(rounded_embedding_scale(config, torch.bfloat16)),
        }.items():
            self._step.set(name, value)

    def _compile(self) -> None:
        precompile(fused_step.__name__, (*fused_step.COMPILED, fused_step.work))
        for function in fused_step.COMPILED:
            self._step.set(function.name, function.address)
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
            "branch": config.hidden_size * 4 if config.has_post_norms else 0,
            "normed": config.hidden_size * 2,
            "qkv": attention * 4 + 2 * config.num_kv_heads * config.head_dim * 4,
            "query": attention * 2,
            "attended": attention * 2,
            "mid": config.intermediate_size * 2,
            "codes": max(attention, config.intermediate_size) if self._quantized else 0,
            "scales": self._weights.most_groups * 4 if self._quantized else 0,
        }
        memory = Arena(sum(num_tokens * width + 64 for width in widths.values()))
        for name, width in widths.items():
            self._buffers[name] = memory.empty(torch.Size((num_tokens * width + 64,)), torch.uint8)
            self._step.set(name, self._buffers[name].data_ptr())

    def _make_parts(self, num_parts: int) -> None:
        """Room for unfinished outputs of attention."""
        needed = num_parts * self.config.num_kv_heads * self._attention.part_bytes
        if needed > self._parts.nbytes:
            self._parts = torch.empty(needed, dtype=torch.uint8)
            self._step.set("parts", self._parts.data_ptr())

    def warmup(self) -> None:
        """Compile everything that a step may need; the pool's contents survive."""
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
        """Time-stamp counter at the start of the last step and at the end of each phase; 0 for phases it skipped."""
        ends: list[int] = self._counters[:, END_STAMP // 8].tolist()
        return [int(self._counters[0, START_STAMP // 8]), *ends]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's K/V into the pool and return the logits [num_sampled, vocab_size] in float32.

        The next call overwrites these. Raises IndexError for an index outside the pool or the vocabulary.
        """
        num_tokens, num_sampled = batch.token_ids.shape[0], batch.sample_indices.shape[0]
        self._check(batch)
        self._make_room(max(num_tokens, num_sampled))
        if num_sampled > self._logits.shape[0]:
            self._logits = torch.empty(num_sampled, self.config.vocab_size, dtype=torch.float32)
        if not self._compiled:
            self._compile()
        tables = batch.block_tables.to(torch.int32).contiguous()
        logits = self._logits[:num_sampled]
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
            self._step.set(name, tensor.data_ptr())
        self._step.set("table_stride", tables.shape[1] * 4)
        self._step.set("num_tokens", num_tokens)
        self._step.set("num_sampled", num_sampled)
        work = self._plan_attention(batch)
        # NumPy, because torch would wake its threads to clear 40 KB and wait for them.
        self._counters.fill(0)
        self._step.set("num_started", 0)
        fused_step.work.on_threads(self._step.address, self._num_threads)
        del work  # its arrays were read by address
        return logits

    def _plan_attention(self, batch: ForwardBatch) -> tuple[AttentionWork, ...]:
        """Write the step's attention tasks into its records; the result must outlive the step."""
        indices = batch.sample_indices.numpy()
        only_sampled = len(indices) < batch.token_ids.shape[0] and bool((indices[1:] > indices[:-1]).all())
        work = tuple(self._attention.plan(batch, window) for window in self._windows)
        if only_sampled:
            work += (self._attention.plan_sampled(batch, self._last_window),)
        self._make_parts(max(each.num_parts for each in work))
        self._step.set("only_sampled", int(only_sampled))
        for record, each in zip(self._work, work, strict=False):
            record["items"], record["num_items"] = each.items.ctypes.data, len(each.items)
            record["merges"], record["num_merges"] = each.merges.ctypes.data, len(each.merges)
            record["heads_per_task"] = each.heads_per_task
        return work

    def _check(self, batch: ForwardBatch) -> None:
        """The compiled step reads and writes raw memory: an index out of range would corrupt it silently."""
        for name, indices, bound in (
            ("token_ids", batch.token_ids, self.config.vocab_size),
            ("positions", batch.positions, self.config.max_position_embeddings),
            ("slot_mapping", batch.slot_mapping, self.kv_pool.num_blocks * self.kv_pool.block_size),
            ("block_tables", batch.block_tables, self.kv_pool.num_blocks),
            ("sample_indices", batch.sample_indices, batch.token_ids.shape[0]),
        ):
            if indices.numel():
                values = indices.numpy()
                # Not assert, which python -O leaves out.
                if int(values.min()) < 0 or int(values.max()) >= bound:
                    raise IndexError(
                        f"{name} from {int(values.min())} to {int(values.max())}; they must be from 0 to {bound - 1}"
                    )


def _bits(value: float) -> int:
    """The bits of a float32, as an integer."""
    return int(np.float32(value).view(np.uint32))
