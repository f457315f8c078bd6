"""Reads results back from the device into pinned memory; the host waits only when it needs them."""

import numpy as np
import numpy.typing as npt
import torch

from kernels.runtime.gpu.copies import Copies, Event

MAX_STEPS_IN_FLIGHT = 2


class Fetched:
    """Integers that are being copied to the host."""

    def __init__(self, memory: torch.Tensor, event: Event) -> None:
        """memory: [n] int32 on the host, complete at `event`."""
        self._memory: torch.Tensor | None = memory
        self._event = event
        self._values: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)

    @property
    def is_done(self) -> bool:
        return self._memory is None or self._event.query()

    def wait(self) -> npt.NDArray[np.int32]:
        """Block until the copy is done; return the values [n] int32, which stay valid when the memory is reused."""
        if self._memory is not None:
            self._event.synchronize()
            self._values, self._memory = self._memory.numpy().copy(), None
        return self._values


class ResultBuffers:
    """Pinned memory for the steps that may be in flight at once. Step thread only."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._memory = [torch.empty(0, dtype=torch.int32)] * MAX_STEPS_IN_FLIGHT
        self._fetched: list[Fetched | None] = [None] * MAX_STEPS_IN_FLIGHT
        self._turn = 0

    def fetch(self, values: torch.Tensor) -> Fetched:
        """Start copying `values` [n] int32 to the host."""
        self._turn = (self._turn + 1) % MAX_STEPS_IN_FLIGHT
        former = self._fetched[self._turn]
        if former is not None:
            # Returns at once if steps are waited for in order; waits only after a step that was abandoned.
            former.wait()
        size = values.numel()
        if size > self._memory[self._turn].numel():
            self._memory[self._turn] = torch.empty(
                max(2 * size, 1024), dtype=torch.int32, pin_memory=self._copies.pins
            )
        memory = self._memory[self._turn][:size]
        self._copies.copy(memory, values)
        fetched = self._fetched[self._turn] = Fetched(memory, self._copies.record())
        return fetched
