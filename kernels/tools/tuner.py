"""Finds launch parameters for the device at hand and writes them to `tuning.json`.

`python -m kernels.tools.tuner [OP[/BUCKET] …]`. A candidate counts only if the op's checks pass with it.
Nothing is written if they fail with the current parameters: then the op is wrong, not slow.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from kernels.ops.gpu.tuning import (
    DEFAULT,
    TABLE_PATH,
    LaunchConfig,
    device_key,
    forget_table,
    launch_config,
    load_table,
    overridden,
)
from kernels.tools.checks import Check, checks_of
from kernels.tools.timing import captured_median_s
from kernels.tools.workloads import tuning_workload

_BLOCKS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "paged_decode": ((0,), (32, 64, 128)),
    "paged_prefill": ((64, 128), (32, 64, 128)),
    "store_kv": ((4, 8, 16), (0,)),
    "rms_norm": ((0,), (0,)),
    "silu_mul": ((0,), (512, 1024, 2048)),
    "embed_tokens": ((0,), (512, 1024, 2048, 4096)),
    "token_counts": ((0,), (1024, 2048, 4096)),
    "block_copy": ((0,), (1024, 2048, 4096)),
    "sampling": ((0,), (1024, 2048, 4096, 8192)),
}
"""(block_m, block_n) tried for each op. Splits of the context are not here: they are part of the numerics."""
_PIPELINED = ("paged_decode", "paged_prefill")
NUM_CALLS = 10
"""calls per measurement: the start of a graph would dominate a single call"""

Measure = Callable[[str, str, torch.device], float]


class TuningRefusedError(Exception):
    """An op's checks fail with the current parameters; nothing was written."""


def candidates(op: str) -> Iterator[LaunchConfig]:
    """All combinations to try; those that do not fit the device fail when they run."""
    stages = (2, 3, 4, 5) if op in _PIPELINED else (1,)
    for num_warps, num_stages, block_m, block_n in product((4, 8, 16), stages, *_BLOCKS[op]):
        yield LaunchConfig(num_warps, num_stages, block_m, block_n)


def measure(op: str, bucket: str, device: torch.device) -> float:
    """Return the seconds that the op's workload takes with the current parameters."""
    return captured_median_s([tuning_workload(op, bucket, device)] * NUM_CALLS, device)


def tune(
    op: str,
    bucket: str,
    device: torch.device,
    *,
    tried: Sequence[LaunchConfig] | None = None,
    checks: Sequence[Check] | None = None,
    measured: Measure = measure,
    path: Path = TABLE_PATH,
) -> LaunchConfig:
    """The fastest candidate whose checks pass, written under the device's name if it beats the current parameters.

    Raises TuningRefusedError when the op's checks fail as it is.
    """
    checks = checks_of(op) if checks is None else checks
    best = launch_config(op, bucket, device)
    reason = _first_failure(checks, device)
    if reason is not None:
        raise TuningRefusedError(f"{op}/{bucket}: {reason}; tuning.json stays as it is")
    best_s = measured(op, bucket, device)
    improved = False
    for candidate in tried if tried is not None else candidates(op):
        with overridden(op, bucket, candidate):
            # Checks compile a variant for each of their shapes, so only what is faster is worth them.
            taken_s = _measured_s(measured, op, bucket, device)
            if taken_s is None or taken_s >= best_s or _first_failure(checks, device) is not None:
                continue
        best, best_s, improved = candidate, taken_s, True
    if improved:
        _write(path, device_key(device), op, bucket, best)
    return best


def _measured_s(measured: Measure, op: str, bucket: str, device: torch.device) -> float | None:
    """Return seconds; None if the candidate does not compile or needs more shared memory than the device has."""
    try:
        return measured(op, bucket, device)
    except Exception:
        return None


def _first_failure(checks: Sequence[Check], device: torch.device) -> str | None:
    if not checks:
        return "it has no checks"
    for check in checks:
        try:
            check.run(device)
        except Exception as error:  # wrong results and compiler errors alike rule the candidate out
            return f"{check.name} failed with {type(error).__name__}: {str(error)[:200]}"
    return None


def _write(path: Path, key: str, op: str, bucket: str, config: LaunchConfig) -> None:
    """Replace the file atomically: a reader sees the old table or the new one."""
    assert key != DEFAULT, "the defaults are safe for every device; a tuned entry belongs to one"
    table = load_table(path)
    table.setdefault(key, {}).setdefault(op, {})[bucket] = asdict(config)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    forget_table()


def main(arguments: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        print("the tuner needs a CUDA device; torch finds none here", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    status = 0
    for op, buckets in load_table(TABLE_PATH)[DEFAULT].items():
        for bucket in buckets:
            if arguments and op not in arguments and f"{op}/{bucket}" not in arguments:
                continue
            try:
                chosen = tune(op, bucket, device)
            except TuningRefusedError as error:
                print(f"refused: {error}", file=sys.stderr)
                status = 1
            else:
                print(json.dumps({"op": op, "bucket": bucket} | asdict(chosen)), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
