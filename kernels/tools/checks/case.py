"""What a check is, and the helpers that all checks share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Check:
    """`run` raises AssertionError where the op and its reference differ."""

    name: str
    ops: tuple[str, ...]
    """The ops of the tuning table that the check exercises."""
    run: Callable[[torch.device], None]


TOLERANCES = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (2e-2, 2e-2),
}
"""(absolute, relative) per element type: a few units in the last place of values around one."""


def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare tensors [...] of equal shape within the tolerance of `actual`'s type, float32, bfloat16 or float16.

    Raises AssertionError, beginning with `what`, where they differ or one has a NaN that the other lacks.
    """
    atol, rtol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(
        actual.float().cpu(),
        expected.float().cpu(),
        atol=atol,
        rtol=rtol,
        msg=lambda found: f"{what}: {found}",
    )


class _Poison(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships its hook without types
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY:
            is_float = result.is_floating_point()
            result.fill_(torch.nan if is_float else torch.iinfo(result.dtype).max)
        return result


_EMPTY = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
)


def poisoned_outputs() -> AbstractContextManager[object]:
    """Fill newly allocated memory with NaN or the largest integer, so that what a kernel does not write shows."""
    return _Poison()  # type: ignore[no-untyped-call]  # torch ships the constructor without types


def generator(seed: int) -> torch.Generator:
    """Return a generator on the host, so that every device gets the same inputs."""
    return torch.Generator().manual_seed(seed)
