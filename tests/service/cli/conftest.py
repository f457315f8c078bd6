"""One worker with an embedded pair and the deterministic engine, for all command tests."""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog

from service.cli import main

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120.0

Tailrace = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Service:
    env: dict[str, str]
    kafka: str
    redis: str


def clean_env(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | extra


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "service.cli", *arguments]


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    runtime = tmp_path_factory.mktemp("runtime")
    env = clean_env(
        XDG_RUNTIME_DIR=str(runtime), TAILRACE_ENGINE="deterministic", TAILRACE_DETERMINISTIC_STEP_MS="2"
    )
    worker = subprocess.Popen(
        command("serve", "--embedded"), env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    events: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read_log, args=(worker, events))
    reader.start()
    seen: list[dict[str, str]] = []
    try:
        while (event := events.get(timeout=TIMEOUT_S)) is not None:
            seen.append(event)
            if event["event"] == "kafka_joined":
                break
        pair = next((event for event in seen if event["event"] == "embedded_pair"), None)
        assert event is not None, f"the worker ended at once: {seen}"
        assert pair is not None
        yield Service(env, pair["kafka"], pair["redis"].split("//")[1].split("/")[0])
    finally:
        worker.terminate()
        code = worker.wait(TIMEOUT_S)
        reader.join()
    assert code == 0
    assert list((runtime / "tailrace").iterdir()) == []


def _read_log(worker: "subprocess.Popen[bytes]", events: "queue.SimpleQueue[dict[str, str] | None]") -> None:
    """To the end, so that the worker never waits for us."""
    assert worker.stderr is not None
    with worker.stderr:
        for line in worker.stderr:
            events.put(json.loads(line))
    events.put(None)


@pytest.fixture
def tailrace(service: Service) -> Tailrace:
    """Runs one command against the service, without settings for its address."""

    def run(*arguments: str, **options: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command(*arguments),
            env=service.env,
            check=False,
            cwd=ROOT,
            input=options.get("stdin", ""),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    return run


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Tailrace]:
    """Runs one command in this process, for errors that are raised before anything heavy is loaded."""
    logging_before = structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
            monkeypatch.delenv(name)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["tailrace", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), output, errors)

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**logging_before)
