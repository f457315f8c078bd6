"""SIGTERM ends `serve` with code 0 and without noise, however early it comes."""

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.service.cli.conftest import ROOT, clean_env, command


@pytest.mark.parametrize("moment", ["pair_starts", "worker_starts"])
def test_early_sigterm_is_a_normal_end(moment: str, tmp_path: Path) -> None:
    env = clean_env(XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path), TAILRACE_ENGINE="deterministic")
    with subprocess.Popen(
        command("serve", "--embedded"), env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as running:
        assert running.stderr is not None
        process = psutil.Process(running.pid)
        if moment == "pair_starts":
            _until_it_has_a_child(process)
        else:
            assert b"embedded_pair" in running.stderr.readline()
        started = process.children(recursive=True)
        running.send_signal(signal.SIGTERM)
        assert b"Traceback" not in running.stderr.read()
        assert running.wait() == 0
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []
    assert not list(tmp_path.glob("tailrace-embedded-*"))


def _until_it_has_a_child(process: psutil.Process, limit_s: float = 20.0) -> None:
    """There is no event for the birth of another process's child."""
    deadline = time.monotonic() + limit_s
    while not process.children():
        assert time.monotonic() < deadline, "no child was started"
        time.sleep(0.005)
