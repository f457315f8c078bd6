"""A built wheel works without the checkout: installed into a new environment, started from an empty folder."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.service.cli.conftest import ROOT, clean_env

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COMMAND_LIMIT_S = 300.0

Installed = Callable[..., str]


def _run(*command: str, cwd: Path, env: dict[str, str]) -> str:
    ended = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Runs a command of the installed wheel in an empty folder; the libraries are those of this environment."""
    if importlib.util.find_spec("hatchling") is None:
        message = "hatchling is not installed; `ops/setup --dev` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    _run(*pip, *build, cwd=folder, env=dict(os.environ))
    (wheel,) = folder.glob("tailrace-*.whl")
    home = folder / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    env = clean_env(XDG_RUNTIME_DIR=str(folder), TAILRACE_ENGINE="deterministic")
    del env["PYTHONUNBUFFERED"]
    env.pop("PYTHONPATH", None)
    _run(*pip, "--python", str(home), "install", "--quiet", "--no-deps", str(wheel), cwd=folder, env=env)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    # A path in a .pth file is only searched: the .pth files found there, such as the checkout's, are not read.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    empty = folder / "empty"
    empty.mkdir()

    def run(*command: str) -> str:
        output = _run(str(home / "bin" / command[0]), *command[1:], cwd=empty, env=env)
        assert list(empty.iterdir()) == []
        return output

    return run


def test_the_packages_come_from_the_wheel_and_are_typed(installed: Installed) -> None:
    code = """
import importlib.resources, kernels, scheduler, service
for package in (kernels, scheduler, service):
    print(package.__file__, importlib.resources.files(package).joinpath("py.typed").is_file())
"""
    for line in installed("python", "-c", code).splitlines():
        path, typed = line.rsplit(" ", 1)
        assert not Path(path).is_relative_to(ROOT)
        assert typed == "True"


def test_the_demo_finds_its_samples(installed: Installed) -> None:
    report = dict(
        line.split("\t") for line in installed("tailrace", "demo").splitlines() if line.count("\t") == 1
    )
    number = len(list((ROOT / "ops/samples").iterdir()))
    assert report["documents"] == f"{number} of {number} summarized, {number} streams proven whole"


def test_a_bench_by_shape_finds_its_prompts(installed: Installed) -> None:
    assert '"requests":4' in installed("tailrace", "bench", "offline", "--shape", "32:8:4", "--json").replace(
        " ", ""
    )
