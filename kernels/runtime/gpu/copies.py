"""Copies between host and device in the order of the work around them: a CUDA stream's, or at once without one."""

from typing import Protocol

import torch


class Event(Protocol):
    """A point in the order of work."""

    def query(self) -> bool:
        """Whether everything before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until everything before it is done."""
        ...


class Copies(Protocol):
    """Used by one thread; the host may go on before a copy is made, and must leave both ends alone until then."""

    @property
    def pins(self) -> bool:
        """Whether host memory has to be pinned for copies that do not hold the host up."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def record(self) -> Event: ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class ImmediateCopies:
    """Without a device nothing is asynchronous."""

    pins = False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record(self) -> Event:
        return _Done()


class StreamCopies:
    """On the device's current stream, between the kernels that are launched before and after."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event


def copies_of(device: torch.device) -> Copies:
    return StreamCopies(device) if device.type == "cuda" else ImmediateCopies()
