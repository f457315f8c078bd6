"""What work costs, counted and not timed: calls made, and memory in use while it runs."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_calls(work: Callable[..., object], *arguments: Any) -> int:
    """Calls of Python and C functions until `work(*arguments)` returns. What one C call does inside does not show."""
    num_calls = 0

    def on_event(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        work(*arguments)
    finally:
        sys.setprofile(before)
    return num_calls


def peak_bytes(work: Callable[..., object], *arguments: Any) -> int:
    """How far the memory that Python and NumPy hold rises while `work` runs: a copy made by one C call shows here."""
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work(*arguments)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if started:
            tracemalloc.stop()


def kept_bytes(work: Callable[..., object], *arguments: Any) -> int:
    """How much more memory Python and NumPy hold after `work` than before it."""
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work(*arguments)
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        if started:
            tracemalloc.stop()
