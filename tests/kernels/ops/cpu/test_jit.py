from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.ops.cpu import jit
from kernels.ops.cpu.intrinsics import i64
from kernels.ops.cpu.jit import (
    _forget_old,
    _is_ours_to_write,
    call_stub,
    compiled_function,
    jit_inline,
    numba,
)
from kernels.ops.cpu.product import Product


@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"])
def test_hazard_kernels_of_one_product_are_not_found_by_the_other(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read rows of different widths: with a shared folder the second process would write past its scratch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = set()
    for product in (Product.DOT, Product.FMA):
        monkeypatch.setattr(jit, "bf16_product", lambda product=product: product)
        given = str(tmp_path) if variable == "NUMBA_CACHE_DIR" else ""
        monkeypatch.setattr(jit.numba.config, "CACHE_DIR", given)
        assert jit.use_cache_folder.__wrapped__()
        folders.add(jit.numba.config.CACHE_DIR)
    assert len(folders) == 2
    assert all(Path(folder).is_relative_to(tmp_path) for folder in folders)


def test_cache_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    assert _is_ours_to_write(tmp_path / "own" / "kernels-1")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    assert not _is_ours_to_write(tmp_path / "shared" / "kernels-1")


def test_cache_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not _is_ours_to_write(tmp_path / "file" / "kernels-1")


def test_old_versions_are_forgotten(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"kernels-{number}").mkdir()
    _forget_old(tmp_path)
    assert len(list(tmp_path.iterdir())) == 8


@compiled_function
def _write_difference(target: int, more: int, less: int) -> None:
    i64(target)[0] = more - less


_call_write_difference = call_stub(_write_difference)


@jit_inline
def _in_another_order(address: int, target: int) -> None:
    _call_write_difference(address, less=2, more=7, target=target)


@jit_inline
def _one_too_few(address: int, target: int) -> None:
    _call_write_difference(address, target=target, more=7)


@jit_inline
def _misspelt(address: int, target: int) -> None:
    _call_write_difference(address, target=target, more=7, fewer=2)


def test_compiled_functions_are_called_by_the_names_of_their_arguments() -> None:
    result = torch.zeros(1, dtype=torch.int64)
    _in_another_order(_write_difference.address, result.data_ptr())
    assert result.item() == 5


@pytest.mark.parametrize("wrong", [_one_too_few, _misspelt])
def test_hazard_a_call_with_wrong_arguments_does_not_compile(wrong: Callable[[int, int], None]) -> None:
    with pytest.raises(numba.errors.TypingError):
        wrong(_write_difference.address, 0)
