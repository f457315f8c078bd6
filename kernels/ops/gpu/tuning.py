"""Launch parameters by operation, device and shape bucket, read from `tuning.json`.

The entries under "default" are safe on every supported architecture: they are the ones compiled ahead and held
to the limits in the tests. A device's own entries are written by `kernels.tools.tuner` and replace them one by one.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

TABLE_PATH = Path(__file__).with_name("tuning.json")
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """What may differ between devices without changing results by more than rounding."""

    num_warps: int
    num_stages: int
    block_m: int = 0
    """rows of a tile; 0 where the kernel derives it from the shape"""
    block_n: int = 0
    """columns of a tile: tokens of context, elements of a row"""


def next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def launch_config(op: str, bucket: str, device: torch.device) -> LaunchConfig:
    """The device's entry for `op` and `bucket`, else the default one. Raises KeyError if there is none."""
    if (op, bucket) in _overrides:
        return _overrides[op, bucket]
    return _lookup(op, bucket, device_key(device))


_overrides: dict[tuple[str, str], LaunchConfig] = {}


@contextmanager
def overridden(op: str, bucket: str, config: LaunchConfig) -> Iterator[None]:
    """Use a candidate for the op and bucket. For the tuner; not thread-safe."""
    _overrides[op, bucket] = config
    try:
        yield
    finally:
        del _overrides[op, bucket]


def device_key(device: torch.device) -> str:
    """The name under which a device has its own entries; CPU and meta tensors take the defaults."""
    if device.type != "cuda":
        return DEFAULT
    return _cuda_name(device.index if device.index is not None else torch.cuda.current_device())


@lru_cache(maxsize=64)
def _cuda_name(index: int) -> str:
    return str(torch.cuda.get_device_name(index))


@lru_cache(maxsize=1024)
def _lookup(op: str, bucket: str, key: str) -> LaunchConfig:
    table = load_table(TABLE_PATH)
    entry = table.get(key, {}).get(op, {}).get(bucket) or table[DEFAULT][op][bucket]
    return LaunchConfig(**entry)


def load_table(path: Path) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """device -> op -> bucket -> fields of LaunchConfig."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def forget_table() -> None:
    """Read `tuning.json` again at the next launch."""
    _lookup.cache_clear()
