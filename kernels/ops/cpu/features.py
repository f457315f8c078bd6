"""The processor's features, for the CPU kernels."""

import os
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba as _numba

_config: Any = _numba.config

_NEEDED = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq"))


@cache
def processor_features() -> frozenset[str]:
    """LLVM's names of the features that Numba compiles for: this processor's, unless NUMBA_CPU_FEATURES is set."""
    named: str | None = _config.CPU_FEATURES
    if named is not None:
        return frozenset(name[1:] for name in named.split(",") if name.startswith("+"))
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


@cache
def cpu_kernels_supported(*, quantized: bool = False) -> bool:
    """Whether this processor has AVX-512 (for int8 also VNNI) and Numba may compile."""
    needed = _NEEDED | ({"avx512vnni"} if quantized else set())
    return os.environ.get("NUMBA_DISABLE_JIT", "0") == "0" and needed <= processor_features()
