"""One host-to-device copy for everything that a step needs, whatever its number of tensors and types."""

from collections.abc import Mapping

import torch

_ALIGNMENT = 16
"""bytes: kernels are specialized for pointers that are multiples of this"""
_NUM_SLOTS = 2
"""Host buffers: one may still be on its way while the next step's is filled."""


class Staging:
    """Packs host tensors into one pinned buffer and copies that once. Step thread only.

    Equal shapes give equal addresses as long as nothing larger was uploaded: CUDA graphs rely on that, each with
    a Staging of its own. Views of one upload are overwritten by the next, in stream order.
    """

    def __init__(self, device: torch.device, capacity_bytes: int = 1 << 16) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._turn = 0
        self._events: list[torch.cuda.Event | None] = [None] * _NUM_SLOTS
        self._allocate(capacity_bytes)

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same names with tensors on the device."""
        offsets, total = _layout(tensors)
        if total > self._target.numel():
            self._wait_for_all()
            self._allocate(2 * total)
        self._turn = (self._turn + 1) % _NUM_SLOTS
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        source = self._sources[self._turn]
        for name, tensor in tensors.items():
            _view(source, offsets[name], tensor).copy_(tensor)
        self._target[:total].copy_(source[:total], non_blocking=True)
        if self._pinned:
            self._events[self._turn] = torch.cuda.current_stream(self._device).record_event(event)
        return {name: _view(self._target, offsets[name], tensor) for name, tensor in tensors.items()}

    def _wait_for_all(self) -> None:
        for event in self._events:
            if event is not None:
                event.synchronize()

    def _allocate(self, capacity_bytes: int) -> None:
        self._sources = [
            torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=self._pinned) for _ in range(_NUM_SLOTS)
        ]
        self._target = torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device)


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    offsets: dict[str, int] = {}
    total = 0
    for name, tensor in tensors.items():
        offsets[name] = total
        total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def _view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
