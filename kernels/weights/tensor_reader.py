"""What every checkpoint format is read through."""

from collections.abc import Mapping
from typing import Protocol

import torch


class TensorReader(Protocol):
    """Tensors of one checkpoint under Hugging Face names, in whatever type they are stored."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...
