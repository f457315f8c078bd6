"""Finds and reads the documents of a run."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from service.errors import JobError, SettingsError

SUFFIXES = frozenset({".txt", ".md", ".rst", ".text"})
MAX_DOCUMENT_BYTES = 32 << 20


def find_documents(paths: Sequence[Path], limit: int | None) -> list[Path]:
    """Return the files, and the text files of folders in order of name, each once. Raises SettingsError."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in _walk(path) if file.suffix.lower() in SUFFIXES)
            if not inside:
                raise SettingsError(f"{path} holds no {', '.join(sorted(SUFFIXES))} files")
            found |= dict.fromkeys(inside)
        elif path.exists():
            found[path] = None
        else:
            raise SettingsError(f"{path} does not exist")
    return list(found)[:limit]


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def read_document(path: Path) -> str:
    """Read UTF-8 text, without a byte order mark. Raises JobError for a file that is not such text."""
    try:
        size = path.stat().st_size
        if size > MAX_DOCUMENT_BYTES:
            raise JobError(
                "document_too_large", f"{path.name} has {size} bytes; the limit is {MAX_DOCUMENT_BYTES}",
                field="size", value=size, limit=MAX_DOCUMENT_BYTES,
            )  # fmt: skip
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobError(
            "invalid_utf8", f"{path.name} is not UTF-8 at byte {error.start}; the limit is valid UTF-8",
            field="text", value=error.start, limit="UTF-8",
        ) from error  # fmt: skip
    except OSError as error:
        raise JobError("unreadable", f"{path.name} cannot be read: {error.strerror}", field="path") from error
