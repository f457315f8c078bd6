"""The output file of a batch run: one JSON line per input, appended as it ends, so that runs resume."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import orjson

from service.errors import SettingsError

Row = dict[str, Any]


def row_key(**parts: Any) -> str:
    """Identity of one unit of work: equal only if input, prompt, model and parameters all are."""
    canonical = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(canonical).hexdigest()


class RowFile:
    """Rows by key. Rows of an earlier run are kept, except those that `redo` says shall be made again.

    A line that a crash cut off in the middle is dropped. Rewriting is atomic: the old file stays until the
    new one is complete.
    """

    def __init__(self, path: Path, *, redo: Callable[[Row], bool] = lambda _row: False) -> None:
        self.path = path
        self.kept: dict[str, Row] = {}
        self.attempts: dict[str, int] = {}
        """Rows per key, dropped ones included: how often it was tried before."""
        self._redo = redo
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        kept_lines, changed = [], False
        for line, row in self._read():
            key = str(row.get("key")) if row else ""
            if row:
                self.attempts[key] = int(row.get("tries", self.attempts.get(key, 0) + 1))
            if not row or key in self.kept or self._redo(row):
                changed = True
                continue
            self.kept[key] = row
            kept_lines.append(line)
        if changed:
            replacement = self.path.with_name(self.path.name + ".new")
            replacement.write_bytes(b"".join(kept_lines))
            replacement.replace(self.path)
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise SettingsError(f"{self.path} cannot be written: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def append(self, row: Mapping[str, Any]) -> None:
        """On disk when this returns: a row that was reported is never lost."""
        assert self._file is not None
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> Iterator[tuple[bytes, Row | None]]:
        """Each line with its row; None for a line that is not one of ours."""
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
