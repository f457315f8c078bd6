"""A worker in a process of its own: forked from a server that has imported the product, with mechanisms switched off
and points armed before it begins."""

import asyncio
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.harness.points import Armed, install
from tests.faults.harness.without import switch_off

END_LIMIT_S = 20.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["service.cli.serve", "service.worker.worker", "tests.faults.harness.without"]
)


class WorkerProcess:
    """Started as it is made. Signals go to its process id; it leads no group and has no children."""

    def __init__(
        self,
        environ: dict[str, str],
        log: Path,
        *,
        without: Sequence[str] = (),
        armed: Sequence[Armed] = (),
        socket: str = "",
    ) -> None:
        self.name = environ["TAILRACE_WORKER_ID"]
        self.admin_port = int(environ.get("TAILRACE_ADMIN_PORT", "0"))
        self.log = log
        self._process = _context.Process(
            target=_serve, args=(environ, str(log), tuple(without), tuple(armed), socket), daemon=True
        )
        self._process.start()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def signal(self, number: signal.Signals) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self._process.join(END_LIMIT_S)

    async def terminate(self, limit_s: float = END_LIMIT_S) -> int | None:
        """SIGTERM; returns the exit code, None when it had to be killed after `limit_s`."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        await asyncio.to_thread(self._process.join, limit_s)
        code = self._process.exitcode
        if code is None:
            self.kill()
        return code


def _serve(
    environ: dict[str, str], log: str, without: Sequence[str], armed: Sequence[Armed], socket: str
) -> None:
    """Runs in the new process; the names of all TAILRACE_ variables come from `environ` alone."""
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        del os.environ[name]
    os.environ.update(environ)
    if offset_s := float(environ.get("FAULTS_CLOCK_OFFSET_S", "0")):
        _set_clock(offset_s)
    from service.cli.serve import serve

    for mechanism in without:
        switch_off(mechanism)
    if killer := environ.get("FAULTS_DIES_AT"):
        _die_at(killer)
    install(armed, socket)
    serve(embedded=False)


def _end_with_the_run() -> None:
    """No worker outlives the process that started it, however that ended."""
    run = multiprocessing.parent_process()
    assert run is not None
    multiprocessing.connection.wait([run.sentinel])
    os._exit(1)


def _set_clock(offset_s: float) -> None:
    from service.worker.namespace import SharedClock

    now = time.time
    time.time = lambda: now() + offset_s
    SharedClock.__init__.__defaults__ = (time.time,)


def _die_at(job_id: str) -> None:
    """The worker dies as the requests of this job are added, like one that the step of a certain prompt kills."""
    from service.worker.intake import Intake

    add_requests = Intake._add_requests

    async def dies(self: Intake, run: Any, prompt: tuple[int, ...]) -> None:
        if run.job_id == job_id:
            os.kill(os.getpid(), signal.SIGKILL)
        await add_requests(self, run, prompt)

    Intake._add_requests = dies  # type: ignore[method-assign]
