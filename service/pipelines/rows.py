"""The output file of a batch run: one JSON line per input, appended when it ends, so that runs resume."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import orjson

from service.errors import SettingsError

Row = dict[str, Any]


class Rows(Protocol):
    """Takes the rows of a run."""

    kept: dict[str, Row]
    """Rows of an earlier run by key, which are not made again."""

    def append(self, row: Row) -> None: ...


def row_key(**parts: Any) -> str:
    """Identify one unit of work: keys are equal only if input, prompt, model and parameters all are."""
    canonical = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(canonical).hexdigest()


class RowFile:
    """Appends rows to a file and knows the last row of each key.

    Rows of an earlier run are kept, except those that `redo` selects to be made again. These stay in the file until
    their replacement is written, because only they tell how often a row was tried. A line that a crash cut off is
    dropped. Rewriting is atomic: the old file stays until the new one is complete. Entering raises SettingsError when
    the file cannot be written or is not an output of this command.
    """

    def __init__(self, path: Path, *, redo: Callable[[Row], bool] = lambda _row: False) -> None:
        self.path = path
        self.kept: dict[str, Row] = {}
        self.attempts: dict[str, int] = {}
        """By key, how often a row was tried before."""
        self._redo = redo
        self._file: IO[bytes] | None = None
        self._to_replace: set[str] = set()
        """Keys of rows that `redo` selects."""
        self._replaced = False

    def __enter__(self) -> Self:
        try:
            rows = self._compact()
            self._file = self.path.open("ab")
        except OSError as error:
            raise SettingsError(f"{self.path} cannot be written: {error.strerror}") from error
        for key, row in rows.items():
            if self._redo(row):
                self._to_replace.add(key)
            else:
                self.kept[key] = row
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()
        if self._replaced:
            with contextlib.suppress(OSError):  # otherwise the next run does it
                self._compact()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row to disk before returning, so that a reported row is never lost."""
        assert self._file is not None
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._replaced |= str(row.get("key")) in self._to_replace

    def _compact(self) -> dict[str, Row]:
        """Leave only the last row of each key in the file, and count attempts. Raises OSError."""
        lines: dict[str, bytes] = {}
        rows: dict[str, Row] = {}
        num_lines = 0
        for line, row in self._read():
            num_lines += 1
            if row is None:
                continue
            key = str(row["key"])
            self.attempts[key] = int(row.get("tries", self.attempts.get(key, 0) + 1))
            lines[key], rows[key] = line, row
        if num_lines > len(lines):
            replacement = self.path.with_name(self.path.name + ".new")
            replacement.write_bytes(b"".join(lines.values()))
            replacement.replace(self.path)
        return rows

    def _read(self) -> Iterator[tuple[bytes, Row | None]]:
        """Yield each line with its row; None for a broken line. Raises SettingsError for a line without a key."""
        if not self.path.exists():
            return
        with self.path.open("rb") as lines:
            for line in lines:
                try:
                    row = orjson.loads(line) if line.endswith(b"\n") else None
                except orjson.JSONDecodeError:
                    row = None
                if row is not None and not (isinstance(row, dict) and "key" in row):
                    raise SettingsError(
                        f"{self.path} holds lines without a key: it is not an output of this command; "
                        "choose another file"
                    )
                yield line, row
