"""The GPU's measured rates and what share of them the kernels reach: `python -m ops.bench.gpu [--json]`.

Needs a CUDA device with about 40 GiB of free memory. An 8B-shaped model with random weights, no download.
"""

import json
import sys
from collections.abc import Sequence

from kernels.errors import OptionsError
from kernels.tools.gpu_bench import run_here

TARGETS = {"decode": 0.70, "attention": 0.90, "prefill": 0.60}
"""Shares of the measured bandwidth, of the bandwidth at 8 K of context or more, and of the measured matrix rate."""


def main(arguments: Sequence[str]) -> int:
    try:
        report = run_here()
    except OptionsError as error:
        print(error, file=sys.stderr)
        return 2
    if "--json" in arguments:
        print(json.dumps(report, indent=2))
        return 0
    print(f"{report['device']}, torch {report['torch']}, {report['dtype']}")
    print(f"copy {report['copy_bytes_per_s']:.4g} bytes/s, matrix {report['matrix_flops_per_s']:.4g} flop/s")
    for part in ("decode", "attention", "prefill", "sampling"):
        lines = report[part]
        assert isinstance(lines, list)
        for line in lines:
            share = line["share"]
            verdict = (
                "" if share is None else f"{share:7.1%} of the measured rate (target {TARGETS[part]:.0%})"
            )
            print(
                f"{part:9} {line['num_rows']:3} x {line['num_tokens']:6}: {line['seconds'] * 1e3:9.3f} ms  "
                f"{line['tokens_per_s']:10.0f} tokens/s  {verdict}"
            )
    steps = report["steps"]
    assert isinstance(steps, list)
    for line in steps:
        print(
            f"steps     {line['num_rows']:3} x {line['num_tokens']:6}: {line['period_s'] * 1e3:9.3f} ms, the device "
            f"idle for {line['idle_share']:.1%}; with look-ahead {line['lookahead_period_s'] * 1e3:.3f} ms, "
            f"{line['lookahead_idle_share']:.1%}: {line['speedup']:.3f} times as fast"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
