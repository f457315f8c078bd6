"""Where a compiled step's time goes, part by part, beside what memory and arithmetic would allow at best."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.batch import ForwardBatch
from kernels.model_config import ModelConfig
from kernels.models.cpu.decoder import FusedDecoder
from kernels.models.cpu.packed_weights import layer_windows
from kernels.ops.linear.packing import pack_linear
from ops.bench.cpu_calls import prepare_linear

LAYER_PHASES = (
    "norm",
    "qkv",
    "rotary",
    "attention",
    "merge",
    "sampled rows",
    "quantize",
    "out",
    "norm",
    "gate and up",
    "quantize",
    "down",
)
"""In the order of kernels.models.cpu.fused_step; rotary includes the write into the pool, and `merge` is attention's.

In models with post-norms, the next `norm` also applies these.
"""
_PART_OF = {
    "qkv": "linears",
    "out": "linears",
    "gate and up": "linears",
    "down": "linears",
    "attention": "attention",
    "merge": "attention",
    "head": "head",
}
"""Phases that are not listed are glue."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that all threads together reach when nothing else limits them."""

    read_bytes_per_s: float
    flops_per_s: float
    """For the type of the linears."""
    attention_flops_per_s: float
    """For bfloat16."""


@dataclass(frozen=True, slots=True)
class PartTime:
    part: str
    best_ms: float
    floor_ms: float
    """The longer of reading the part's memory once and doing its multiplications."""


def phase_names(num_layers: int) -> tuple[str, ...]:
    """The names of all phases of a step, in order."""
    return ("embed", *LAYER_PHASES * num_layers, "norm", "head")


def profile_step(
    decoder: FusedDecoder, batch: ForwardBatch, rates: Rates, repeats: int = 20
) -> list[PartTime]:
    """Add up, for each part, the best time of each phase over `repeats` identical steps.

    The best per phase, not per step, is least affected by other processes.
    """
    best: list[float] = []
    started_s, first_stamp, stamps = time.perf_counter(), 0, [0]
    for _ in range(repeats):
        decoder.forward(batch)
        stamps = decoder.stamps()
        first_stamp = first_stamp or stamps[0]
        durations = _durations(stamps)
        if min(durations) < 0:
            continue  # a thread was descheduled before it could write its phase's end
        best = [min(pair) for pair in zip(best, durations, strict=True)] if best else durations
    ticks_per_ms = (max(stamps) - first_stamp) / (time.perf_counter() - started_s) / 1e3
    spent = dict.fromkeys(("linears", "attention", "head", "glue"), 0.0)
    for name, ticks in zip(phase_names(decoder.config.num_layers), best, strict=False):
        spent[_PART_OF.get(name, "glue")] += ticks / ticks_per_ms
    floors = _floors(decoder, batch, rates)
    return [PartTime(part, spent[part], floors[part]) for part in spent]


def _durations(stamps: list[int]) -> list[float]:
    last, durations = stamps[0], []
    for stamp in stamps[1:]:
        durations.append(float(stamp - last) if stamp else 0.0)
        last = stamp or last
    return durations


def _floors(decoder: FusedDecoder, batch: ForwardBatch, rates: Rates) -> dict[str, float]:
    config = decoder.config
    num_tokens, num_sampled = batch.token_ids.shape[0], batch.sample_indices.shape[0]

    def floor_ms(num_bytes: float, flops: float) -> float:
        return max(num_bytes / rates.read_bytes_per_s, flops / rates.flops_per_s) * 1e3

    layers = config.num_layers * layer_weights(config)
    head = config.vocab_size * config.hidden_size
    width = decoder.bytes_per_weight
    read, seen = keys_of_step(layer_windows(config), batch)
    kv_bytes = 4 * config.num_kv_heads * config.head_dim * read
    attention_flops = 4.0 * config.num_heads * config.head_dim * seen
    return {
        "linears": floor_ms(layers * width, 2.0 * layers * num_tokens),
        "attention": max(floor_ms(kv_bytes, 0), attention_flops / rates.attention_flops_per_s * 1e3),
        "head": floor_ms(head * width, 2.0 * head * num_sampled),
        "glue": 0.0,
    }


def keys_of_step(windows: Sequence[int], batch: ForwardBatch) -> tuple[int, int]:
    """The number of keys that rows read, and that their tokens see, summed over layers with these windows (0: none)."""
    read = seen = 0
    lengths = batch.query_start.diff()
    for window in windows:
        row_keys, token_keys = batch.context_lens, batch.positions + 1
        if window:
            # A row's first token looks back furthest: over window - 1 tokens before it.
            row_keys, token_keys = row_keys.minimum(lengths + window - 1), token_keys.clamp(max=window)
        read, seen = read + int(row_keys.sum()), seen + int(token_keys.sum())
    return read, seen


def layer_weights(config: ModelConfig) -> int:
    """The number of elements of one layer's matrices."""
    attention = (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.hidden_size * (2 * attention + 3 * config.intermediate_size)


def measure_rates(quantized: bool, num_threads: int) -> Rates:
    """Measure reading 256 MiB, and a product on operands in the caches times the number of threads."""
    memory = torch.zeros(1 << 25, dtype=torch.int64)
    read_s = _best_s(memory.sum)
    return Rates(
        memory.nbytes / read_s,
        num_threads * _product_flops_per_s(quantized),
        num_threads * _product_flops_per_s(quantized=False),
    )


def _product_flops_per_s(quantized: bool) -> float:
    x, packed = torch.randn(48, 512).bfloat16(), pack_linear(torch.randn(512, 512), quantized=quantized)
    return 2 * 48 * 512 * 512 / _best_s(prepare_linear(x, packed), repeats=200)


def _best_s(run: Callable[[], object], repeats: int = 10) -> float:
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return min(times)
