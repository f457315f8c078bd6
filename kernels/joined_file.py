"""A model file that came in parts, put together once in the user's cache."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kernels.errors import ModelFileError

_CHUNK_BYTES = 1 << 22


def joined_file(name: str, parts: Sequence[Path], sha256: str) -> Path:
    """`<cache>/tailrace/<name>.gguf`, written at the first call; later calls trust a file of the right size.

    The cache is $XDG_CACHE_HOME or ~/.cache. Raises ModelFileError when the parts do not give `sha256`, or the
    folder cannot be written.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace"
    target = folder / f"{name}.gguf"
    if target.is_file() and target.stat().st_size == sum(part.stat().st_size for part in parts):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _join(parts, target, sha256)
    except OSError as error:
        raise ModelFileError(
            f"model {name!r}: its {len(parts)} parts cannot be put together at {target}: {error}"
        ) from error
    return target


def _join(parts: Sequence[Path], target: Path, sha256: str) -> None:
    """Under another name until it is whole, so that neither a crash nor a second process leaves half a file."""
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as out:
        try:
            for part in parts:
                with part.open("rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
            out.close()
            if digest.hexdigest() != sha256:
                raise ModelFileError(
                    f"{parts[0].parent}: the parts of {target.name} have sha256 {digest.hexdigest()}; expected {sha256}"
                )
            os.replace(out.name, target)
        except BaseException:
            Path(out.name).unlink(missing_ok=True)
            raise
