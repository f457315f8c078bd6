"""The key-value part of a GGUF file, read in one pass.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package maps each of the hundred
thousand strings of a vocabulary into an array of its own and needs two seconds for it.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, Final

from service.errors import SettingsError

_MAX_KEYS: Final = 1 << 16
_MAX_ENTRIES: Final = 1 << 24
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_U64 = struct.Struct("<Q")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys and values; SettingsError when the file is no GGUF of version 2 or 3."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise SettingsError(f"model: {path.name} is not a GGUF file (it starts with {data[:4]!r})")
        try:
            return _Reader(data).read()
        except (struct.error, UnicodeDecodeError, _BrokenError) as error:
            raise SettingsError(f"model: {path.name} is a broken GGUF file: {error}") from None


class _BrokenError(Exception):
    pass


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 4

    def read(self) -> dict[str, Any]:
        version = self._scalar("I")
        if version not in (2, 3):
            raise _BrokenError(f"version {version} is not 2 or 3")
        self._scalar("Q")  # number of tensors
        num_keys = self._count(_MAX_KEYS)
        return {self._string(): self._value(self._scalar("I")) for _ in range(num_keys)}

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._offset)
        self._offset += struct.calcsize(f"<{code}")
        return value

    def _count(self, limit: int) -> int:
        (count,) = _U64.unpack_from(self._data, self._offset)
        self._offset += 8
        if count > limit:
            raise _BrokenError(f"a count of {count} at byte {self._offset - 8} is above the limit {limit}")
        return int(count)

    def _string(self) -> str:
        (length,) = _U64.unpack_from(self._data, self._offset)
        start = self._offset + 8
        self._offset = start + length
        if self._offset > len(self._data):
            raise _BrokenError(f"a string at byte {start} runs past the end of the file")
        # Tokens of byte-level vocabularies are text; a few converters leave half a character in a name.
        return self._data[start : self._offset].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _BrokenError(f"value type {kind} at byte {self._offset} is unknown")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind = self._scalar("I")
        count = self._count(_MAX_ENTRIES)
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise _BrokenError(f"array entry type {kind} at byte {self._offset} is not supported")
        layout = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack_from(layout, self._data, self._offset))
        self._offset += struct.calcsize(layout)
        return values
