"""How the CPU kernels are compiled: Numba with LLVM intrinsics, kept on disk, run without the GIL.

Numba compiles a function again inside each of its callers. So the large pieces are `unit`s: compiled once, to a
plain C function of int64 arguments, and called by address.
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba as _numba
from llvmlite import ir
from numba.extending import intrinsic as numba_intrinsic

numba: Any = _numba
types: Any = numba.types
"""Numba is typed only in part."""

Float = Any
"""A float32 inside a kernel: numpy's scalars and Python's floats do not mix for a type checker."""

# NaN and infinity must survive (a poisoned row is found by its logits), so neither `nnan` nor `ninf`.
_FAST_MATH = {"reassoc", "nsz", "arcp", "contract"}
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": _FAST_MATH, "error_model": "numpy"}
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16", "avx512vnni")


@cache
def cpu_kernels_supported() -> bool:
    """Whether this processor has the bfloat16 and int8 dot products, and Numba may compile."""
    features = llvm.get_host_cpu_features()
    return os.environ.get("NUMBA_DISABLE_JIT", "0") == "0" and all(features.get(name) for name in _NEEDED)


class Unit:
    """A kernel compiled at its first use to `void function(int64, …)`; callable, or by `address` from a kernel."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self.num_arguments = function.__code__.co_argcount

    @cached_property
    def _compiled(self) -> Any:
        _use_cache_folder()
        signature = types.void(*[types.int64] * self.num_arguments)
        return numba.cfunc(signature, cache=True, **_OPTIONS)(self._function)

    @property
    def address(self) -> int:
        address: int = self._compiled.address
        return address

    @cached_property
    def _callable(self) -> Any:
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self.num_arguments)(self.address)

    def __call__(self, *arguments: int) -> None:
        self._callable(*arguments)


def unit(function: Callable[..., None]) -> Unit:
    """Compile on its own, all arguments int64."""
    return Unit(function)


def device(function: Callable[..., Any]) -> Any:
    """Compile into whatever calls it: for small functions."""
    return numba.njit(**_OPTIONS)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Emit LLVM instructions where a kernel calls it."""
    return numba_intrinsic(function)


@intrinsic
def call(typing_context: Any, address: Any, *arguments: Any) -> Any:  # noqa: ARG001
    """Call the unit at `address` with int64 arguments."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        integer = ir.IntType(64)
        unpacked = [builder.extract_value(values[1], index) for index in range(len(arguments))]
        function = ir.FunctionType(ir.VoidType(), [integer] * len(arguments)).as_pointer()
        builder.call(builder.inttoptr(values[0], function), unpacked)
        return context.get_dummy_value()

    return types.void(types.int64, types.StarArgTuple([types.int64] * len(arguments))), generate


def _sources_digest() -> str:
    root = Path(__file__).parents[2]
    sources = (
        *(root / "ops").glob("*/cpu.py"),
        *(root / "ops" / "cpu").glob("*.py"),
        root / "models" / "fused_step.py",
    )
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _use_cache_folder() -> None:
    # Numba looks only at the unit's own file when it decides whether a cached kernel is stale, so
    # the folder's name is a hash of all kernel sources.
    if numba.config.CACHE_DIR:
        return
    digest = _sources_digest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (base / "tailrace", Path(tempfile.gettempdir()) / f"tailrace-{os.getuid()}"):
        target = folder / f"kernels-{digest}"
        try:
            target.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=target):
                pass
        except OSError:
            continue
        numba.config.CACHE_DIR = str(target)
        return
