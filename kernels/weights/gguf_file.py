"""The GGUF container: metadata and where each tensor lies. Every length is checked against the file's size.

Written out here because the reader of the gguf package builds Python objects for each vocabulary entry:
2 s and 100 MB where this takes 30 ms. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from kernels.errors import ModelFileError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 20
_MAX_KEPT_ARRAY = 1024
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class LongArray:
    """The length of an array that is too long to keep, such as a vocabulary."""

    length: int


Value = int | float | bool | str | LongArray | list["Value"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape as GGUF writes it, fastest dimension first; offset from the start of the data section."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


class GgufFile:
    """Metadata by key, tensors by name, bytes from a read-only map of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = path.stat().st_size
            if size == 0:
                raise ModelFileError(f"{path} is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(path, self._map)
        if cursor.take(4) != _MAGIC:
            raise ModelFileError(f"{path} does not start with {_MAGIC.decode()}: it is no GGUF file")
        version = cursor.scalar(_U32)
        if version not in _VERSIONS:
            raise ModelFileError(f"{path}: GGUF version {version} is not supported; supported: 2, 3")
        num_tensors, num_keys = cursor.count("tensors"), cursor.count("metadata keys")
        self.metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(int(cursor.scalar(_U32)))
        self.tensors = {info.name: info for info in (cursor.tensor_info() for _ in range(num_tensors))}
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileError(f"{path}: general.alignment is {alignment!r}; it must be a positive integer")
        self._data_start = -(-cursor.offset // alignment) * alignment

    def data(self, info: TensorInfo, start: int, num_bytes: int) -> memoryview:
        """Bytes [start, start + num_bytes) of a tensor; a view, valid while it is referenced."""
        begin = self._data_start + info.offset + start
        return memoryview(self._map)[begin : begin + num_bytes]

    def check_extent(self, info: TensorInfo, num_bytes: int) -> None:
        end = self._data_start + info.offset + num_bytes
        if end > len(self._map):
            raise ModelFileError(
                f"{self.path} is truncated: tensor {info.name} ends at byte {end}, "
                f"the file at {len(self._map)}"
            )


class _Cursor:
    """Reads forward and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        self._skip(num_bytes)
        return self._data[self.offset - num_bytes : self.offset]

    def _skip(self, num_bytes: int) -> None:
        if self.offset + num_bytes > len(self._data):
            raise ModelFileError(
                f"{self._path} is truncated: {num_bytes} bytes wanted "
                f"at byte {self.offset} of {len(self._data)}"
            )
        self.offset += num_bytes

    def scalar(self, kind: struct.Struct) -> int | float | bool:
        value: int | float | bool = kind.unpack(self.take(kind.size))[0]
        return value

    def count(self, what: str) -> int:
        value = int(self.scalar(_U64))
        if value > _MAX_ENTRIES:
            raise ModelFileError(f"{self._path}: {value} {what}; the limit is {_MAX_ENTRIES}")
        return value

    def string(self) -> str:
        raw = self.take(int(self.scalar(_U64)))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileError(
                f"{self._path}: string before byte {self.offset} is no UTF-8: {error}"
            ) from error

    def value(self, type_id: int, depth: int = 0) -> Value:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            return self._array(depth)
        raise ModelFileError(f"{self._path}: unknown metadata type {type_id} before byte {self.offset}")

    def _array(self, depth: int) -> Value:
        element_type, length = int(self.scalar(_U32)), int(self.scalar(_U64))
        if length <= _MAX_KEPT_ARRAY:
            return [self.value(element_type, depth + 1) for _ in range(length)]
        if element_type in _SCALARS:
            self._skip(length * _SCALARS[element_type].size)
        elif element_type == _STRING:
            self._skip_strings(length)
        else:
            raise ModelFileError(f"{self._path}: an array of {length} arrays before byte {self.offset}")
        return LongArray(length)

    def _skip_strings(self, length: int) -> None:
        data, offset, size, unpack = self._data, self.offset, len(self._data), _U64.unpack_from
        for _ in range(length):
            if offset + 8 > size:
                raise ModelFileError(
                    f"{self._path} is truncated: an array of strings at byte {offset} of {size}"
                )
            offset += 8 + unpack(data, offset)[0]
        self.offset = offset
        self._skip(0)

    def tensor_info(self) -> TensorInfo:
        name, num_dims = self.string(), int(self.scalar(_U32))
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ModelFileError(
                f"{self._path}: tensor {name} has {num_dims} dimensions; the limit is {_MAX_DIMS}"
            )
        dims = tuple(int(self.scalar(_U64)) for _ in range(num_dims))
        return TensorInfo(name, dims, int(self.scalar(_U32)), int(self.scalar(_U64)))
