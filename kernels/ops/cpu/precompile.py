"""Compiles a module's functions in a process of its own, before this one loads them from the cache.

The code that Numba runs right after compiling and the code that it caches come from the same source, but they differ:
sums round differently. If the first process of a machine ran the fresh code and all later processes
the cached code, a job that moves between them could continue with another token. So every process loads cached code.
"""

import hashlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import llvmlite.binding as llvm

from kernels.ops.cpu.jit import CompiledFunction, numba, use_cache_folder
from kernels.ops.cpu.product import bf16_product

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 600.0

_CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from kernels.ops.cpu.product import Product, set_bf16_product
set_bf16_product(Product(sys.argv[3]))
from kernels.ops.cpu.jit import numba
numba.config.CACHE_DIR = sys.argv[2]
import importlib
for name in sys.argv[5:]:
    getattr(importlib.import_module(sys.argv[4]), name).address
"""


def precompile(module: str, functions: Sequence[CompiledFunction]) -> None:
    """Compile and cache, in seconds and once per machine. If that fails, functions compile when first used."""
    if not use_cache_folder():
        return
    folder = Path(numba.config.CACHE_DIR)
    marker = folder / f"ready-{_fingerprint(functions)}"
    if marker.exists():
        return
    names = [function.name for function in functions]
    command = [sys.executable, "-c", _CHILD, str(ROOT), str(folder.parent), bf16_product(), module, *names]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode == 0:
        marker.touch()


def _fingerprint(functions: Sequence[CompiledFunction]) -> str:
    """A hash of what Numba's index compares: each source and when it was written, the compiler and the processor."""
    sources = [(function.name, function.source, function.source.stat().st_mtime_ns) for function in functions]
    target = (numba.config.CPU_NAME or llvm.get_host_cpu_name(), numba.config.CPU_FEATURES)
    facts = (sources, numba.__version__, platform.python_version(), target)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
