"""How the CPU kernels are compiled: Numba with LLVM intrinsics, cached on disk, run without the GIL.

Numba compiles a function again inside each of its callers. So large functions are compiled once, each to a plain C
function of int64 arguments, and called by address.
"""

import ctypes
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numba as _numba
import torch
from llvmlite import ir
from numba.extending import intrinsic as numba_intrinsic

from kernels.ops.cpu.product import bf16_product

numba: Any = _numba
types: Any = numba.types
"""Numba is only partly typed."""

Float = Any
"""A float32 inside a kernel: numpy's scalars and Python's floats do not mix for a type checker."""

# NaN and infinity must survive (a poisoned row is found by its logits), so neither `nnan` nor `ninf`.
_FAST_MATH = {"reassoc", "nsz", "arcp", "contract"}
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": _FAST_MATH, "error_model": "numpy"}
_KEPT_VERSIONS = 8


class CompiledFunction:
    """Compiled at its first use to `void function(int64, …)`. Python calls it directly, kernels through a call stub."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self.name = function.__name__
        self.source = Path(function.__code__.co_filename)
        self.parameters = function.__code__.co_varnames[: function.__code__.co_argcount]

    @cached_property
    def _compiled(self) -> Any:
        signature = types.void(*[types.int64] * len(self.parameters))
        return numba.cfunc(signature, cache=use_cache_folder(), **_OPTIONS)(self._function)

    @property
    def address(self) -> int:
        address: int = self._compiled.address
        return address

    @cached_property
    def _callable(self) -> Any:
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(self.parameters))(self.address)

    def __call__(self, *arguments: int) -> None:
        self._callable(*arguments)

    def on_threads(self, argument: int, num_threads: int) -> None:
        """Call the one-argument function on `num_threads` threads at once, this one included; the GIL is released.

        Fewer threads may run: the work is shared so that this only costs time. The threads are those of the OpenMP
        library that torch runs on: idle threads of a pool of our own would spin on the cores that torch needs.
        """
        parallel = _gomp_parallel()
        if parallel is None or num_threads == 1:
            self(argument)
        else:
            parallel(self.address, argument, num_threads, 0)


@cache
def _gomp_parallel() -> Any:
    """GCC's entry point for a parallel region (LLVM's and Intel's OpenMP have it too), None if torch has none."""
    try:
        # The symbol is looked up through torch's own library, because another OpenMP may be loaded as well.
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


def compiled_function(function: Callable[..., None]) -> CompiledFunction:
    """Compile on its own, all arguments int64."""
    return CompiledFunction(function)


def jit_inline(function: Callable[..., Any]) -> Any:
    """Compile into each caller: for small functions."""
    return numba.njit(**_OPTIONS)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Emit LLVM instructions where a kernel calls it."""
    return numba_intrinsic(function)


@intrinsic
def _call(typing_context: Any, address: Any, *arguments: Any) -> Any:  # noqa: ARG001
    """Call the compiled function at `address` with int64 arguments."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        integer = ir.IntType(64)
        unpacked = [builder.extract_value(values[1], index) for index in range(len(arguments))]
        function = ir.FunctionType(ir.VoidType(), [integer] * len(arguments)).as_pointer()
        builder.call(builder.inttoptr(values[0], function), unpacked)
        return context.get_dummy_value()

    return types.void(types.int64, types.StarArgTuple([types.int64] * len(arguments))), generate


def call_stub(function: CompiledFunction) -> Any:
    """A stub through which kernels call `function`: its address, then its arguments by name.

    A missing or unknown argument is an error when the caller compiles.
    """
    names = ", ".join(function.parameters)
    namespace: dict[str, Any] = {"_call": _call}
    exec(f"def {function.name}(address, {names}):\n    _call(address, {names})\n", namespace)
    return jit_inline(namespace[function.name])


def _sources_fingerprint() -> str:
    root = Path(__file__).parents[2]
    sources = (
        *(root / "ops").glob("*/cpu*.py"),
        *(root / "ops" / "cpu").glob("*.py"),
        *(root / "models" / "cpu").glob("*.py"),
    )
    fingerprint = hashlib.sha256()
    for source in sorted(sources):
        fingerprint.update(source.read_bytes())
    return fingerprint.hexdigest()[:16]


@cache
def use_cache_folder() -> bool:
    """Keep kernels in NUMBA_CACHE_DIR or the user's cache. False if neither is usable: each process compiles anew."""
    # Numba looks only at the function's own file when it decides whether a cached kernel is stale, so
    # the folder's name is a hash of all kernel sources and says which product they were compiled for.
    name = f"kernels-{_sources_fingerprint()}-{bf16_product()}"
    given = numba.config.CACHE_DIR
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace"
    for folder in (Path(given),) if given else (own, Path(tempfile.gettempdir()) / f"tailrace-{os.getuid()}"):
        if _is_ours_to_write(folder / name):
            numba.config.CACHE_DIR = str(folder / name)
            _forget_old(folder)
            return True
    return False


def _is_ours_to_write(folder: Path) -> bool:
    """Cached kernels are loaded as code, so a folder that another user could write to is not used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (folder, folder.parent):
            status = each.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _forget_old(folder: Path) -> None:
    """Keep the kernels of the last few versions; processes that run older ones have them in memory."""
    versions = sorted(folder.glob("kernels-*"), key=lambda version: version.stat().st_mtime, reverse=True)
    for version in versions[_KEPT_VERSIONS:]:
        shutil.rmtree(version, ignore_errors=True)
