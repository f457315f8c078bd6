"""What is peculiar to Gemma 3's checkpoints."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from kernels.weights.layout import TensorReader

_TEXT_PREFIX = re.compile(r"(language_model\.model|model\.language_model|language_model)\.")
_PICTURES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


class Gemma3Tensors:
    """The text part, its norms as the factors 1 + w that they multiply by, in float32 whatever the model's type.

    Checkpoints that also read pictures keep the text part under a prefix, which differs between versions of
    transformers. Safetensors hold w (`norm_offset` 1), GGUF files 1 + w (0); near one, bfloat16 would lose most of w.
    """

    def __init__(self, reader: TensorReader, norm_offset: float) -> None:
        self._reader = reader
        self._norm_offset = norm_offset
        self._stored = {_text_name(name): name for name in reader.shapes if not _PICTURES.match(name)}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: reader.shapes[stored] for name, stored in self._stored.items()
        }

    def file_of(self, name: str) -> Path:
        return self._reader.file_of(self._stored[name])

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if not name.endswith("norm.weight"):
            return self._reader.load(self._stored[name], dtype)
        return self._reader.load(self._stored[name], torch.float32) + self._norm_offset


def _text_name(name: str) -> str:
    match = _TEXT_PREFIX.match(name)
    if match is None:
        return name
    inner = name[match.end() :]
    return inner if inner.startswith("lm_head.") else f"model.{inner}"
