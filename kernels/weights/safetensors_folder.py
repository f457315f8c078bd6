"""Tensors of a Hugging Face folder: one model.safetensors, or shards under an index."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from kernels.errors import ModelFileError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _Handle(Protocol):
    """What safe_open returns; its own stubs are untyped."""

    def keys(self) -> Iterable[str]: ...

    def get_slice(self, name: str) -> _Slice: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class SafetensorsFolder:
    """The tensors of memory-mapped files; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelFileError if a file is missing, damaged or contradicts the index."""
        self._folder = folder
        index = _read_index(folder)
        self._files = {name: _open(folder / name) for name in sorted({*index.values()} or {_SINGLE})}
        self._file_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file_name, file in self._files.items():
            for name in file.keys():  # noqa: SIM118  a safe_open handle is no mapping
                self._add(file_name, name)
        lost = [name for name, file_name in index.items() if self._file_of.get(name) != file_name]
        if lost:
            raise ModelFileError(
                f"{folder / index[lost[0]]} lacks {len(lost)} tensors that {_INDEX} promises, such as {lost[0]}"
            )

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

    def file_of(self, name: str) -> Path:
        return self._folder / self._file_of[name]

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a tensor of shape `shapes[name]`, converted to `dtype`."""
        return self._files[self._file_of[name]].get_tensor(name).to(dtype)


def _read_index(folder: Path) -> dict[str, str]:
    """The name of the file that holds each tensor; empty for a folder with a single file."""
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _SINGLE).is_file():
            raise ModelFileError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
        return {}
    try:
        found: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelFileError(f"{index} is no index of shards: {error!r:.200}") from error
    for name in found.values():
        if not isinstance(name, str) or not _is_shard(folder, name):
            raise ModelFileError(f"{index} names the shard {name!r:.100}, which is not in {folder}")
    return found


def _is_shard(folder: Path, name: str) -> bool:
    try:
        return (folder / name).parent == folder and (folder / name).is_file()
    except OSError:  # a name that no file can have, such as one of 300 characters
        return False


def _open(path: Path) -> _Handle:
    try:
        handle: _Handle = safe_open(path, framework="pt", device="cpu")
        return handle
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} is damaged or no safetensors file: {error!s:.300}") from error
