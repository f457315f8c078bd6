"""Runs the embedded pair as one async context manager."""

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from service.embedded import announcements, servers
from service.errors import DependencyError

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 8.0


class EmbeddedStack:
    """Starts both servers as children and ends them, and only them, on exit.

    Without ports it takes the usual ones if they are free. `announce` lets other commands of the same user
    find the pair. `failed` resolves to a sentence if a server ends by itself. The constructor and entering the
    context raise DependencyError when a port is taken, a program is missing or a server does not start.
    """

    def __init__(
        self, *, kafka_port: int | None = None, redis_port: int | None = None, announce: bool = True
    ) -> None:
        self.kafka_port = servers.pick_port("kafka", kafka_port, servers.KAFKA_PORT)
        self.redis_port = servers.pick_port("redis", redis_port, servers.REDIS_PORT)
        self.pids: dict[str, int] = {}
        self._announce = announce
        self._announced: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[str] | None = None

    @property
    def kafka_bootstrap(self) -> str:
        return f"{servers.HOST}:{self.kafka_port}"

    @property
    def redis_url(self) -> str:
        return f"redis://{servers.HOST}:{self.redis_port}/0"

    @property
    def failed(self) -> "asyncio.Task[str]":
        assert self._watch is not None, "only inside the context"
        return self._watch

    async def __aenter__(self) -> Self:
        scratch = Path(tempfile.mkdtemp(prefix="tailrace-embedded-"))
        try:
            spec = self._spec(scratch)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")), json.dumps(spec),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            self.pids = await self._read_ready()
            if self._announce:
                self._announced = self._tell_others(self._process.pid)
        except BaseException:
            await self._stop()
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self._watch = asyncio.create_task(self._wait_for_failure(), name="embedded-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._announced:
            self._announced.unlink(missing_ok=True)
        await self._stop()

    def _spec(self, scratch: Path) -> dict[str, object]:
        return {
            "start_timeout_s": START_TIMEOUT_S,
            "scratch": str(scratch),
            "servers": {
                "kafka": {
                    "port": self.kafka_port,
                    "command": servers.broker_command(self.kafka_port, scratch),
                },
                "redis": {
                    "port": self.redis_port,
                    "command": servers.redis_command(self.redis_port, scratch),
                },
            },
        }

    def _tell_others(self, pid: int) -> Path:
        ticks = announcements.start_ticks(pid) or 0
        try:
            return announcements.announce(
                announcements.Endpoints(self.kafka_bootstrap, self.redis_url, pid, ticks)
            )
        except OSError as error:
            raise DependencyError(f"the embedded pair cannot be announced: {error}") from error

    async def _read_ready(self) -> dict[str, int]:
        message = await self._read_message()
        if "ready" not in message:
            raise DependencyError(
                str(message.get("failed", "the embedded servers' supervisor ended at once"))
            )
        return {str(name): int(pid) for name, pid in message["ready"].items()}

    async def _wait_for_failure(self) -> str:
        message = await self._read_message()
        return str(message.get("failed", "the embedded servers' supervisor was killed"))

    async def _read_message(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return dict(json.loads(line)) if line else {}

    async def _stop(self) -> None:
        """Stop the supervisor by closing its standard input; kill it when it does not stop."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
