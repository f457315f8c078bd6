"""Runs the two servers as children and ends them when the parent process ends, however it ends.

Runs as a script (`python -I -S supervisor.py SPEC`) on the standard library alone, so that it starts in milliseconds.
The parent holds the other end of standard input: when that closes, because the parent closed it or was
killed, the servers end. Their own death signal covers the case that the supervisor itself is killed.
"""

import ctypes
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, NoReturn

PR_SET_PDEATHSIG = 1
POLL_S = 0.02
WATCH_S = 0.5
KILL_AFTER_S = 2.0


def main() -> int:
    """Write one JSON line to standard output, {"ready": {name: pid}}; later {"failed": sentence} if a server ends."""
    spec = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, _raise_exit)
    servers: dict[str, subprocess.Popen[bytes]] = {}
    logs: dict[str, IO[bytes]] = {}
    try:
        for name, server in spec["servers"].items():
            logs[name] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
            servers[name] = _start(server["command"], logs[name])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        deadline = time.monotonic() + spec["start_timeout_s"]
        for name, server in spec["servers"].items():
            problem = _wait_until_listening(servers[name], server["port"], deadline)
            if problem:
                return _report(f"embedded {name} on port {server['port']} {problem}: {_tail(logs[name])}")
        # The broker keeps everything in memory and would only save a copy here.
        shutil.rmtree(spec["scratch"], ignore_errors=True)
        _tell({"ready": {name: child.pid for name, child in servers.items()}})
        return _watch(servers, logs)
    except (SystemExit, BrokenPipeError):
        return 0  # asked to end, or the parent is gone
    finally:
        _stop(servers)
        shutil.rmtree(spec["scratch"], ignore_errors=True)


def _raise_exit(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def _start(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a server; SIGTERM stays blocked until the caller has noted it, so that none is left running."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Safe here: this process has one thread.
        preexec_fn=functools.partial(_in_server, os.getpid()),  # noqa: PLW1509
    )


def _in_server(supervisor: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)  # It was killed before the death signal was asked for.


def _wait_until_listening(server: subprocess.Popen[bytes], port: int, deadline: float) -> str:
    """Return an empty string when the server accepts connections, else what went wrong."""
    while time.monotonic() < deadline:
        if server.poll() is not None:
            return f"ended at once with code {server.returncode}"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return ""
        except OSError:
            time.sleep(POLL_S)
    return "did not answer in time"


def _watch(servers: dict[str, subprocess.Popen[bytes]], logs: dict[str, IO[bytes]]) -> int:
    """Wait until the parent closes standard input or a server ends by itself; return the exit code."""
    parent = os.getppid()
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], WATCH_S)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            return 0
        for name, server in servers.items():
            if server.poll() is not None:
                return _report(f"embedded {name} ended with code {server.returncode}: {_tail(logs[name])}")
    return 0


def _report(sentence: str) -> int:
    _tell({"failed": sentence})
    return 1


def _tell(message: dict[str, object]) -> None:
    """Write unbuffered: a line that a dead parent did not read must not be written again at exit."""
    os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")


def _tail(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 2_000))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return " | ".join(lines[-5:]) or "it said nothing"


def _stop(servers: dict[str, subprocess.Popen[bytes]]) -> None:
    for server in servers.values():
        server.terminate()
    for server in servers.values():
        try:
            server.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
