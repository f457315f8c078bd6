"""One interface for every checkpoint format: a ModelConfig and tensors under Hugging Face names."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels.model_config import ModelConfig
from kernels.weights.gguf_model import open_gguf
from kernels.weights.hugging_face import read_config
from kernels.weights.layout import TensorReader, check_layout, has_head_of_its_own
from kernels.weights.safetensors_folder import SafetensorsFolder
from kernels.weights.source import ModelFormat, ModelSource

_TEXT_PREFIX = re.compile(r"(language_model\.model|model\.language_model|language_model)\.")
_PICTURES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


class Weights(Mapping[str, torch.Tensor]):
    """Tensors by name, read and converted at each access and not kept.

    A model that reads each name once never has more than one tensor twice in memory.
    """

    def __init__(self, reader: TensorReader, dtype: torch.dtype) -> None:
        """dtype: to which tensors [...] are converted; norms of Gemma 3 become float32."""
        self._reader = reader
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor [...] of the shape that `reader.shapes` gives. Raises KeyError for an unknown name."""
        if name not in self._reader.shapes:
            raise KeyError(name)
        return self._reader.load(name, self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._reader.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.shapes)

    def __len__(self) -> int:
        return len(self._reader.shapes)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    config: ModelConfig
    weights: Weights


def open_checkpoint(source: ModelSource, dtype: torch.dtype) -> Checkpoint:
    """Read the headers and check every name and shape; the data stays on disk.

    Raises ModelFileError for damaged, incomplete or unsupported checkpoints.
    """
    reader: TensorReader
    if source.format is ModelFormat.GGUF:
        config, reader = open_gguf(source.path)
    else:
        config = read_config(source.path)
        reader = SafetensorsFolder(source.path)
    if config.model_type == "gemma3":
        reader = _Gemma3Tensors(reader, norm_offset=0.0 if source.format is ModelFormat.GGUF else 1.0)
    if has_head_of_its_own(config, reader):
        config = replace(config, tie_word_embeddings=False)
    check_layout(source.path, config, reader)
    return Checkpoint(config, Weights(reader, dtype))


class _Gemma3Tensors:
    """The tensors of the text part; norms are the factors 1 + w, in float32 whatever the model's type.

    Checkpoints of models that also read images keep the text part under a prefix, which differs between versions of
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
