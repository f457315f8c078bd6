"""Runs Triton's interpreter in a process without TRITON_INTERPRET, with fixes for its errors.

Interpretation replaces triton.language's builtins while it lasts, so it runs on one thread at a time and never beside
a compilation. Written against Triton 3.6 and 3.7; `tests/kernels/ops/gpu/test_jit.py` says what it relies on.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

_lock = threading.RLock()
_create_dot = InterpreterBuilder.create_dot
_convert_float = interpreter._convert_float
_patch_lang_tensor = interpreter._patch_lang_tensor

_FLOATS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def interpret(function: Callable[..., Any], grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Run a kernel's function once per grid point on CPU tensors."""
    with interpreting():
        _interpreted(function)[grid](**arguments)


@lru_cache(maxsize=512)
def _interpreted(function: Callable[..., Any]) -> Any:
    return InterpretedFunction(function)


@contextmanager
def interpreting() -> Iterator[None]:
    """Let device functions, including those of triton.language (`tl.sum`, `tl.max`), be called as plain Python.

    Without TRITON_INTERPRET at import they are JITFunctions, which cannot be called outside a kernel.
    """
    with _lock:
        call = JITFunction.__call__
        interpreter._patch_lang_tensor = _patch_tensor
        # The standard library's functions see triton.language.core, which a kernel's own module does not import.
        core = interpreter._patch_lang(tl.standard.sum.fn)
        JITFunction.__call__, InterpreterBuilder.create_dot = _call, _dot
        interpreter._convert_float = _convert
        try:
            # -inf and wrap-around are part of the arithmetic here, as they are on a GPU.
            with np.errstate(all="ignore"):
                yield
        finally:
            JITFunction.__call__, InterpreterBuilder.create_dot = call, _create_dot
            interpreter._convert_float = _convert_float
            core.restore()
            interpreter._patch_lang_tensor = _patch_lang_tensor


@contextmanager
def compiling() -> Iterator[None]:
    """Hold off interpretation while something compiles in this process."""
    with _lock:
        yield


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    # Triton 3.6 takes int() of an array of one element, which numpy 2.5 refuses.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return _rewritten(function.fn)(*args, **kwargs)


@lru_cache(maxsize=512)
def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    # Not InterpretedFunction.__call__, which patches triton.language again and never restores it.
    rewritten: Callable[..., Any] = InterpretedFunction(function).rewrite()
    return rewritten


def _dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter's dot, also for bfloat16: it stores these as their 16 bits and would multiply the bits."""
    return _create_dot(builder, _widen(a), _widen(b), *rest)


def _widen(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _convert(source: Any, source_type: Any, target_type: Any, rounding: Any) -> Any:
    """Convert between float types as the hardware does: to nearest even, fp8 saturating.

    The interpreter's own conversion truncates to bfloat16 and loses the carry when rounding to fp8 (1.97 becomes 1.0).
    """
    if source_type not in _FLOATS or target_type not in _FLOATS:
        return _convert_float(source, source_type, target_type, rounding)
    bits = np.ascontiguousarray(source).view(_UNSIGNED[source.dtype.itemsize])
    values = torch.from_numpy(bits).view(_FLOATS[source_type]).float()
    target = _FLOATS[target_type]
    if target.itemsize == 1:
        largest = torch.finfo(target).max
        values = values.clamp(-largest, largest)
    converted = values.to(target).contiguous()
    return converted.view(getattr(torch, f"uint{8 * target.itemsize}")).numpy()
