"""One face for every checkpoint format: a ModelConfig and tensors under Hugging Face names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from kernels.config import ModelConfig
from kernels.weights.gemma3_tensors import Gemma3Tensors
from kernels.weights.gguf_model import open_gguf
from kernels.weights.hugging_face import read_config
from kernels.weights.layout import TensorReader, check_layout, has_head_of_its_own
from kernels.weights.safetensors_folder import SafetensorsFolder
from kernels.weights.source import ModelFormat, ModelSource


class Weights(Mapping[str, torch.Tensor]):
    """Tensors by name, read and converted at each access and not kept.

    Whoever builds a model takes each name once: then no more than one tensor exists twice at any time.
    """

    def __init__(self, reader: TensorReader, dtype: torch.dtype) -> None:
        self._reader = reader
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
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
    """Reads the headers, checks every name and shape, and leaves the data on disk.

    Raises ModelFileError for damaged, incomplete or unsupported checkpoints.
    """
    reader: TensorReader
    if source.format is ModelFormat.GGUF:
        config, reader = open_gguf(source.path)
    else:
        config = read_config(source.path)
        reader = SafetensorsFolder(source.path)
    if config.gemma3 is not None:
        reader = Gemma3Tensors(reader, norm_offset=0.0 if source.format is ModelFormat.GGUF else 1.0)
    if has_head_of_its_own(config, reader):
        config = replace(config, tie_word_embeddings=False)
    check_layout(source.path, config, reader)
    return Checkpoint(config, Weights(reader, dtype))
