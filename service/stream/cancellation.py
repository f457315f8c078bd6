"""Keeping cancellations that a library loses."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cancellation_kept() -> Iterator[None]:
    """Raises the CancelledError that the awaits inside have swallowed.

    redis-py writes through `asyncio.wait_for` when there is a socket timeout, and before Python 3.12 that returns
    normally when a cancellation arrives just as the write completes: the task would then run for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
