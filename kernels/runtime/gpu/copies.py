"""Copies between host and device in stream order; without a device they are made at once."""

from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Return whether everything before this point is done."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until everything before this point is done."""
        ...


class Copies(Protocol):
    """Used by one thread. Copies may be asynchronous; the host must not touch source or target before they are made."""

    @property
    def pins(self) -> bool:
        """Whether asynchronous copies need pinned host memory."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` [...] to `target`, which has the same shape and dtype."""
        ...

    def record(self) -> Event:
        """Return the point after all copies so far."""
        ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class ImmediateCopies:
    """Copies without a device, made at once."""

    pins = False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` [...] to `target`, which has the same shape and dtype, before returning."""
        target.copy_(source)

    def record(self) -> Event:
        return _Done()


class StreamCopies:
    """Copies on the device's current stream, in order with the kernels launched there."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue the copy of `source` [...] to `target`, which has the same shape and dtype."""
        target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event


def copies_of(device: torch.device) -> Copies:
    return StreamCopies(device) if device.type == "cuda" else ImmediateCopies()
