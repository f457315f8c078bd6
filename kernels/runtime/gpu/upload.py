"""One host-to-device copy for all tensors that a step needs, whatever their number and types."""

from collections.abc import Mapping

import torch

from kernels.runtime.gpu.copies import Copies, Event

_ALIGNMENT = 16
"""bytes: kernels are specialized for pointers that are multiples of this"""
_MIN_BUFFER_BYTES = 1 << 16
NUM_BUFFERS = 6
"""Host buffers. At most two steps are in flight, each with at most three uploads: the step itself, what does not fit
its target, and masks. So no upload waits for a copy that has not been made yet."""


class Staging:
    """Packs host tensors into one pinned buffer and copies that once. Step thread only."""

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self._device = device
        self._copies = copies
        self._buffers = [_HostBuffer(self._copies.pins) for _ in range(NUM_BUFFERS)]
        self._turn = 0
        self.num_uploads = 0
        """The number of uploads so far; a step should need one."""

    def new_target(self, num_bytes: int) -> torch.Tensor:
        """Allocate [num_bytes] uint8 on the device, to upload into."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def upload(
        self, tensors: Mapping[str, torch.Tensor], into: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Copy tensors [...] of any type to the device; return them under the same names.

        With `into`, [num_bytes] uint8, they are placed there in order and must fit. The address of each depends on the
        shapes before it, which CUDA graphs rely on, and the next upload overwrites them in stream order. Without `into`
        they get new memory.
        """
        offsets, total = _layout(tensors)
        target = self.new_target(total) if into is None else into
        assert total <= target.numel(), f"{total} bytes to upload into {target.numel()}"
        self._turn = (self._turn + 1) % NUM_BUFFERS
        buffer = self._buffers[self._turn]
        source = buffer.acquire(total)
        for name, tensor in tensors.items():
            _view(source, offsets[name], tensor).copy_(tensor)
        self._copies.copy(target[:total], source)
        buffer.event = self._copies.record()
        self.num_uploads += 1
        return {name: _view(target, offsets[name], tensor) for name, tensor in tensors.items()}


class _HostBuffer:
    """Host memory that is not rewritten before its last copy has been made."""

    def __init__(self, pins: bool) -> None:
        self._pins = pins
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.event: Event | None = None

    def acquire(self, num_bytes: int) -> torch.Tensor:
        if self.event is not None:
            self.event.synchronize()
        if num_bytes > self._memory.numel():
            size = max(2 * num_bytes, _MIN_BUFFER_BYTES)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pins)
        return self._memory[:num_bytes]


def num_staged_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes that tensors [...] of any type occupy in a target."""
    return _layout(tensors)[1]


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    offsets: dict[str, int] = {}
    total = 0
    for name, tensor in tensors.items():
        offsets[name] = total
        total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def _view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
