"""What the model and the sampler of one runner share: uploads, and the sampled tokens that stay on the device."""

from collections.abc import Mapping
from dataclasses import fields

import torch

from kernels.batch import ForwardBatch
from kernels.runtime.gpu.copies import Copies, copies_of
from kernels.runtime.gpu.upload import Staging, num_staged_bytes

RING_TOKENS = 4
"""Positions remembered per slot; a power of two. A step reads the newest and writes the next. At most two steps are in
flight, so a step that is run again still finds what it read."""


_BATCH_TENSORS = tuple(field.name for field in fields(ForwardBatch) if field.name != "num_decode_rows")


class StepInputs:
    """Step thread only. The sampler adds its tensors before the forward pass, which uploads them with its own."""

    def __init__(self, device: torch.device, max_num_seqs: int, *, copies: Copies | None = None) -> None:
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.copies = copies or copies_of(device)
        self.staging = Staging(device, self.copies)
        self.ring = torch.zeros((max_num_seqs, RING_TOKENS), dtype=torch.int32, device=device)
        """[max_num_seqs, RING_TOKENS] int32: the token that a slot sampled for position p, at p modulo the width."""
        self._added: Mapping[str, torch.Tensor] = {}
        self._arrived: dict[str, torch.Tensor] | None = None

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep host tensors [...] of any type for the next upload; they replace what was added before."""
        self._added, self._arrived = tensors, None

    def upload(
        self, tensors: Mapping[str, torch.Tensor], into: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Upload the model's tensors [...] and what was added; return the model's on the device, by the same names.

        `into` [num_bytes] uint8 gets the model's tensors at its beginning. Added tensors that do not fit behind them,
        such as a long history, take a second copy.
        """
        added = {f"added.{name}": tensor for name, tensor in self._added.items()}
        both = {**tensors, **added}
        fits = into is None or num_staged_bytes(both) <= into.numel()
        on_device = self.staging.upload(both if fits else tensors, into)
        if not fits:
            on_device |= self.staging.upload(added)
        self._arrived = {name: on_device.pop(f"added.{name}") for name in self._added}
        return on_device

    def upload_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """Copy the batch, and what the sampler has added, to the device in one copy; return the batch there."""
        return ForwardBatch(**self.upload(batch_tensors(batch)), num_decode_rows=batch.num_decode_rows)

    def take(self) -> dict[str, torch.Tensor]:
        """Return what was added, shapes [...] and dtypes unchanged, on the device; upload it if no model ran since."""
        arrived, added = self._arrived, self._added
        self._added, self._arrived = {}, None
        if arrived is None:
            arrived = self.staging.upload(added) if added else {}
        return arrived


def batch_tensors(batch: ForwardBatch) -> dict[str, torch.Tensor]:
    """Return the batch's tensors by field name, with the shapes [...] and dtypes that ForwardBatch gives."""
    return {name: getattr(batch, name) for name in _BATCH_TENSORS}
