from pathlib import Path

from kernels.ops.cpu.jit import _forget_old, _is_ours_to_write


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
