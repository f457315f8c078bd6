"""Tensors of a Hugging Face folder: one model.safetensors, or shards under an index."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from kernels.errors import ModelFileError

_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _Handle(Protocol):
    """What safe_open gives; its own stubs are untyped."""

    def keys(self) -> Iterable[str]: ...

    def get_slice(self, name: str) -> _Slice: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class SafetensorsFolder:
    """Memory-mapped; a tensor is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {path.name: _open(path) for path in _data_files(folder)}
        self._file_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file_name, file in self._files.items():
            for name in file.keys():  # noqa: SIM118  a safe_open handle is no mapping
                self._add(file_name, name)

    def _add(self, file_name: str, name: str) -> None:
        if name in self._file_of:
            raise ModelFileError(
                f"{self._folder}: tensor {name} is in both {self._file_of[name]} and {file_name}"
            )
        header = self._files[file_name].get_slice(name)
        if header.get_dtype() not in _DTYPES:
            raise ModelFileError(
                f"{self._folder / file_name}: tensor {name} is stored as {header.get_dtype()}; "
                f"supported: {', '.join(_DTYPES)}"
            )
        self._file_of[name] = file_name
        self.shapes[name] = tuple(header.get_shape())

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._files[self._file_of[name]].get_tensor(name).to(dtype)


def _data_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ModelFileError(f"{folder} holds neither model.safetensors nor {_INDEX}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelFileError(f"{index} is no index of shards: {error!r}") from error
    paths = []
    for name in names:
        path = folder / str(name)
        if path.parent != folder or not path.is_file():
            raise ModelFileError(f"{index} names the shard {name!r}, which is not in {folder}")
        paths.append(path)
    return paths


def _open(path: Path) -> _Handle:
    try:
        handle: _Handle = safe_open(path, framework="pt", device="cpu")
        return handle
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} is damaged or no safetensors file: {error}") from error
