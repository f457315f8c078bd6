"""The demo ends by itself, or by Ctrl-C at any moment, and leaves nothing running and nothing on disk."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.service.cli.conftest import ROOT, clean_env, command


def _env(folder: Path) -> dict[str, str]:
    return clean_env(
        XDG_RUNTIME_DIR=str(folder), TMPDIR=str(folder), TAILRACE_ENGINE="deterministic",
        TAILRACE_DETERMINISTIC_STEP_MS="2",
    )  # fmt: skip


def test_demo_summarizes_every_document_and_reports(tmp_path: Path) -> None:
    ended = subprocess.run(
        command("demo"),
        env=_env(tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = dict(line.split("\t") for line in ended.stdout.splitlines() if line.count("\t") == 1)
    number = len(list((ROOT / "ops/samples").iterdir()))
    assert report["documents"] == f"{number} of {number} summarized, {number} streams proven whole"
    assert {"jobs", "output tokens/s", "TTFT p50 / p99", "TPOT p50 / p99", "slot use"} <= report.keys()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("starting", signal.SIGINT),
        ("ready", signal.SIGINT),
        ("streaming", signal.SIGINT),
        ("streaming", signal.SIGTERM),
        ("streaming", signal.SIGKILL),
    ],
)
def test_ending_it_leaves_nothing(tmp_path: Path, moment: str, how: signal.Signals) -> None:
    with subprocess.Popen(
        command("demo"),
        env=_env(tmp_path),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stderr is not None
        assert demo.stdout is not None
        assert "starting" in demo.stderr.readline()
        if moment != "starting":
            assert "ready" in demo.stderr.readline()
        if moment == "streaming":
            assert "|" in demo.stdout.readline()
        children = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(how)
        _, stderr = demo.communicate(timeout=60)
        expected = -how if how is signal.SIGKILL else 128 + how
        assert demo.returncode == expected, stderr
        assert "Traceback" not in stderr
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert list(tmp_path.iterdir()) == []
