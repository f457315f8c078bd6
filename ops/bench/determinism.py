"""The cost on the CPU of results that are bit-identical in any batch (level 2 of decision 0009).

    python -m ops.bench.determinism [--model M] [--rows 1,4,8,16,64,256] [--contexts 1x250,64x250,8x4000] [--json]

Measures a model's bfloat16 matrices, each once, and its attention, on one thread; the best of several runs counts:

strict      our kernels: the sums of a row are taken in one order, whatever other rows there are
relaxed     the same tile without that rule where this can help, see relaxed_tile
onednn      torch's own product over re-ordered weights, which picks a kernel by the number of rows
sdpa        torch's own attention over contiguous K and V, without block tables

The cost of the strict level is strict / relaxed: the same code with and without the rule. The others show whether the
rule keeps us from using something faster that torch has: strict / fastest above 1 means that it does.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernels.model_config import ModelConfig
from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.ops.cpu.product_choice import choose_bf16_product
from kernels.ops.linear.packing import PANEL, pack_linear
from kernels.runtime.kv_pool import KVPool
from kernels.weights.checkpoint import open_checkpoint
from kernels.weights.source import resolve_model
from ops.bench.cpu_calls import attend_row
from ops.bench.relaxed_tile import left_type, product

BLOCK_SIZE = 32
REPEATS = 15

Ways = Mapping[str, Callable[[], object]]


def best_ms(ways: Ways, repeats: int = REPEATS) -> dict[str, float]:
    """The best CPU time of this thread. The variants alternate, so that other load affects all of them."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, run in ways.items():
            started_s = time.thread_time()
            run()
            best[name] = min(best[name], (time.thread_time() - started_s) * 1e3)
    return best


def matrix_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of every matrix in a step, including the head."""
    attention = config.num_heads * config.head_dim
    qkv = attention + 2 * config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    layer = [(qkv, hidden), (hidden, attention), (2 * intermediate, hidden), (hidden, intermediate)]
    return [*layer * config.num_layers, (config.vocab_size, hidden)]


class Matrices:
    """Random weights of a model's shapes, in both packings."""

    def __init__(self, config: ModelConfig) -> None:
        weights = [torch.randn(shape).mul_(0.05).bfloat16() for shape in matrix_shapes(config)]
        self._ours = [pack_linear(weight) for weight in weights]
        self._theirs = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in weights]

    def measure(self, rows: int) -> dict[str, float]:
        inputs = {packed.num_inputs: torch.randn(rows, packed.num_inputs).bfloat16() for packed in self._ours}
        rows_of = {size: x.to(left_type()) for size, x in inputs.items()}
        num_panels = max(packed.panels.shape[0] for packed in self._ours)
        out = torch.empty(num_panels, rows, PANEL)

        def ours(*, strict: bool) -> None:
            for packed in self._ours:
                product(rows_of[packed.num_inputs], packed, out, strict=strict)

        def theirs() -> None:
            for packed, weight in zip(self._ours, self._theirs, strict=True):
                torch.ops.mkldnn._linear_pointwise(inputs[packed.num_inputs], weight, None, "none", [], "")

        return best_ms(
            {"strict": lambda: ours(strict=True), "relaxed": lambda: ours(strict=False), "onednn": theirs}
        )


def measure_attention(config: ModelConfig, batch: int, context: int) -> dict[str, float]:
    """One layer's decode attention of `batch` rows, each over its own `context` tokens."""
    blocks = -(-context // BLOCK_SIZE)
    one_layer = ModelConfig(**{name: getattr(config, name) for name in config.__slots__} | {"num_layers": 1})
    pool = KVPool(one_layer, batch * blocks, BLOCK_SIZE, torch.bfloat16)
    pool.keys.normal_()
    pool.values.normal_()
    tables = torch.randperm(batch * blocks).to(torch.int32).view(batch, blocks)
    query = torch.randn(batch, config.num_heads, config.head_dim).bfloat16()
    size = (batch, config.num_kv_heads, context, config.head_dim)
    ways: dict[str, Callable[[], object]] = {}

    def strict() -> None:
        for row in range(batch):
            attend_row(query[row : row + 1], pool.keys[0], pool.values[0], tables[row], context - 1)

    ways["strict"] = strict
    for dtype in (torch.float32, torch.bfloat16):
        key, value = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
        # A group's heads become queries of their KV head, which is fastest here.
        grouped = query.to(dtype).view(batch, config.num_kv_heads, -1, config.head_dim)
        ways[f"sdpa_{str(dtype).removeprefix('torch.')}"] = _sdpa(grouped, key, value)
    return best_ms(ways)


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)


def with_ratios(times: Mapping[str, float]) -> dict[str, float]:
    fastest = min(time_ms for name, time_ms in times.items() if name != "strict")
    line = {f"{name}_ms": round(time_ms, 3) for name, time_ms in times.items()}
    if "relaxed" in times:
        line["strict_to_relaxed"] = round(times["strict"] / times["relaxed"], 3)
    return line | {"strict_to_fastest": round(times["strict"] / fastest, 3)}


@torch.inference_mode()
def run(config: ModelConfig, rows: Sequence[int], contexts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    torch.set_num_threads(1)
    matrices = Matrices(config)
    return {
        "linears": [{"rows": count} | with_ratios(matrices.measure(count)) for count in rows],
        "attention": [
            {"batch": batch, "context": context} | with_ratios(measure_attention(config, batch, context))
            for batch, context in contexts
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", default="1,2,4,8,16,64,256")
    parser.add_argument("--contexts", default="1x250,64x250,8x4000")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not cpu_kernels_supported():
        print(
            "this processor takes the portable path, which does not promise level 2: there is nothing to compare"
        )
        return 1
    choose_bf16_product()
    config = open_checkpoint(resolve_model(options.model), torch.bfloat16).config
    contexts = [
        (int(batch), int(context))
        for batch, context in (each.split("x") for each in options.contexts.split(","))
    ]
    report = run(config, [int(count) for count in options.rows.split(",")], contexts)
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    for part, lines in report.items():
        print(part)
        print("".join(f"{name:>20}" for name in lines[0]))
        for line in lines:
            print("".join(f"{value:>20}" for value in line.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
