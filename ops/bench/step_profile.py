"""Where a step's time goes: `python -m ops.bench.step_profile [--int8] [--product P] [--prefill TOKENS] …`.

Linears, attention, head and glue (norms, rotary, K/V write, quantization) in ms per batch size (or for the last
chunk of one prompt), each beside its floor:
memory read once at the measured bandwidth, or multiplications at the measured rate, whichever takes longer.
"""

import argparse
import json
from dataclasses import asdict

import torch

from kernels.batch import ForwardBatch
from kernels.models.cpu.decoder import FusedDecoder, fused_supported
from kernels.ops.cpu.product_choice import choose_bf16_product
from kernels.runtime.kv_pool import KVPool
from kernels.weights.checkpoint import open_checkpoint
from kernels.weights.source import resolve_model
from ops.bench.step_parts import PartTime, measure_rates, profile_step

_BLOCK_SIZE = 32
_CHUNK_TOKENS = 512


def decode_batch(batch: int, context_tokens: int) -> ForwardBatch:
    """`batch` rows that each compute the last of `context_tokens` tokens, in blocks of their own."""
    blocks = -(-context_tokens // _BLOCK_SIZE)
    tables = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    last = context_tokens - 1
    slots = tables[:, last // _BLOCK_SIZE].long() * _BLOCK_SIZE + last % _BLOCK_SIZE
    rows = torch.arange(batch)
    return ForwardBatch(
        token_ids=rows + 5,
        positions=torch.full((batch,), last),
        slot_mapping=slots,
        block_tables=tables,
        query_start=torch.arange(batch + 1, dtype=torch.int32),
        context_lens=torch.full((batch,), context_tokens, dtype=torch.int32),
        sample_indices=rows,
        num_decode_rows=batch,
    )


def prefill_batch(prompt_tokens: int) -> ForwardBatch:
    """A batch with the last chunk of one prompt."""
    count = min(prompt_tokens, _CHUNK_TOKENS)
    blocks = -(-prompt_tokens // _BLOCK_SIZE)
    positions = torch.arange(prompt_tokens - count, prompt_tokens)
    return ForwardBatch(
        token_ids=positions % 997,
        positions=positions,
        slot_mapping=positions,
        block_tables=torch.arange(blocks, dtype=torch.int32).view(1, blocks),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([prompt_tokens], dtype=torch.int32),
        sample_indices=torch.tensor([count - 1]),
        num_decode_rows=0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument(
        "--product", choices=("dot", "fma"), help="how bfloat16 is multiplied; else the quicker"
    )
    parser.add_argument("--batch", default="1,8,32,64")
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument("--prefill", type=int, metavar="TOKENS", help="profile a prompt's last chunk instead")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    choose_bf16_product(arguments.product or "auto")
    if arguments.prefill:
        batches = {1: prefill_batch(arguments.prefill)}
    else:
        sizes = [int(size) for size in arguments.batch.split(",")]
        batches = {size: decode_batch(size, arguments.context) for size in sizes}
    checkpoint = open_checkpoint(resolve_model(arguments.model), torch.bfloat16)
    num_blocks = max(1 + int(batch.block_tables.max()) for batch in batches.values())
    pool = KVPool(checkpoint.config, num_blocks, _BLOCK_SIZE, torch.bfloat16)
    if not fused_supported(checkpoint.config, pool, torch.bfloat16, quantized=arguments.int8):
        print("this processor or model does not take the compiled step; there is nothing to profile")
        return 1
    # Pages that were never written all map to one page of zeros, which would stay in the cache.
    pool.keys.normal_()
    pool.values.normal_()
    decoder = FusedDecoder(
        checkpoint.config, checkpoint.weights, pool, quantized=arguments.int8, num_threads=None
    )
    decoder.warmup()
    rates = measure_rates(arguments.int8, decoder.num_threads)
    times = {size: profile_step(decoder, batch, rates) for size, batch in batches.items()}
    if arguments.json:
        rows = {size: [asdict(part) for part in parts] for size, parts in times.items()}
        print(json.dumps({"rates": asdict(rates), "batches": rows}, indent=2))
        return 0
    print(
        f"read {rates.read_bytes_per_s / 1e9:.1f} GB/s, multiply {rates.flops_per_s / 1e9:.0f} GFLOP/s, ms (floor)"
    )
    names = [part.part for part in next(iter(times.values()))]
    print(f"{'batch':>5} {'total':>8}" + "".join(f"{name:>20}" for name in names))
    for size, parts in times.items():
        print(f"{size:5} {sum(part.best_ms for part in parts):8.2f}" + "".join(_cell(part) for part in parts))
    return 0


def _cell(part: PartTime) -> str:
    return f"{part.best_ms:11.2f} ({part.floor_ms:6.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
