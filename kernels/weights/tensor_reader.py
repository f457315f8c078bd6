"""What every checkpoint format is read through."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch


class TensorReader(Protocol):
    """Tensors of one checkpoint under Hugging Face names, in whatever type they are stored."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def file_of(self, name: str) -> Path:
        """Which file holds a tensor, for messages."""
        ...

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...
