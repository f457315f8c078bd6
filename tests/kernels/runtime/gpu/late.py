"""Simulates devices that run later than the host."""

from collections import deque

import torch

from kernels.runtime.gpu.copies import Event, ImmediateCopies


class LateCopies:
    """Makes a copy only when it, or something after it, is waited for."""

    pins = False

    def __init__(self) -> None:
        self._queue: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._num_queued = 0
        self.num_waits = 0
        """waits for copies that had not been made"""
        self.copied: list[torch.Tensor] = []
        """each copy's contents when it was made"""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._queue.append((target, source))
        self._num_queued += 1

    def record(self) -> Event:
        return _Reached(self, self._num_queued)

    def reach(self, num_copies: int) -> None:
        """Make copies up to this one."""
        while len(self.copied) < num_copies:
            target, source = self._queue.popleft()
            target.copy_(source)
            self.copied.append(target.clone())


class _Reached:
    def __init__(self, copies: LateCopies, num_copies: int) -> None:
        self._copies = copies
        self._num_copies = num_copies

    def query(self) -> bool:
        return len(self._copies.copied) >= self._num_copies

    def synchronize(self) -> None:
        self._copies.num_waits += not self.query()
        self._copies.reach(self._num_copies)


class LateEvents(ImmediateCopies):
    """Copies at once, as interpreted kernels need, but reports a copy as done only once it, or something after it, was
    waited for: the host knows no token of a step that it has not waited for."""

    def __init__(self) -> None:
        self._num_recorded = 0
        self.reached = 0
        self.num_waits = 0
        """waits for copies that had not been made"""

    def record(self) -> Event:
        self._num_recorded += 1
        return _Waited(self, self._num_recorded)


class _Waited:
    def __init__(self, copies: LateEvents, number: int) -> None:
        self._copies = copies
        self._number = number

    def query(self) -> bool:
        return self._copies.reached >= self._number

    def synchronize(self) -> None:
        self._copies.num_waits += not self.query()
        self._copies.reached = max(self._copies.reached, self._number)
