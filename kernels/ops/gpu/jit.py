"""One Triton function, three ways to run it: on a CUDA device, in Triton's interpreter, or recorded for the compiler.

The device of the tensors decides, not the environment: CUDA tensors are compiled and launched, CPU tensors are
interpreted, and meta tensors only record the launch, so that the same call can be compiled for a machine that is
not there. Nothing here needs TRITON_INTERPRET, and one process can do all three.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch on meta tensors: all that the compiler needs to know."""

    kernel: "Kernel"
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int


class Kernel:
    """A Triton kernel with one typed entry, `launch`."""

    def __init__(self, function: Callable[..., Any], unspecialized: Sequence[str] = ()) -> None:
        self.name = function.__name__.lstrip("_")
        names = list(unspecialized)
        self.compiled: Any = JITFunction(
            function, do_not_specialize=names, do_not_specialize_on_alignment=names
        )
        self._function = function

    def launch(
        self, grid: tuple[int, ...], arguments: dict[str, Any], *, num_warps: int = 4, num_stages: int = 2
    ) -> None:
        """Run once per grid point on the device of the first tensor in `arguments`; an empty grid runs nothing."""
        if 0 in grid:
            return
        device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
        if device.type == "meta":
            _record(Launch(self, arguments, num_warps, num_stages))
        elif device.type == "cpu":
            # Here, because it patches private parts of Triton, which serving on a device does not need.
            from kernels.ops.gpu.interpreter import interpret

            interpret(self._function, grid, arguments)
        else:
            self.compiled[grid](**arguments, num_warps=num_warps, num_stages=num_stages)


def kernel(*unspecialized: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator for a function that is launched from the host.

    Triton compiles a variant for integers that are 1 or multiples of 16 and for pointers that are multiples of 16
    bytes. Name the parameters whose alignment changes from step to step: compiling a new variant takes a second.
    """
    return lambda function: Kernel(function, unspecialized)


def device_function(function: Callable[..., Any]) -> Any:
    """Decorator for a function that kernels call."""
    return JITFunction(function)


_recorders: list[list[Launch]] = []


def _record(launch: Launch) -> None:
    if _recorders:
        _recorders[-1].append(launch)


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collect the launches on meta tensors. Not for concurrent use."""
    _recorders.append([])
    try:
        yield _recorders[-1]
    finally:
        _recorders.pop()
