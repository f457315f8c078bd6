"""Lets other commands of the same user find a running embedded pair: one small file per pair."""

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_ENTRIES = 64
"""Files that a search reads; it removes stale ones."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    kafka_bootstrap: str
    redis_url: str
    supervisor_pid: int
    started_ticks: int
    """When that process started, in clock ticks since boot: another process may have the same pid by now."""


def runtime_folder() -> Path:
    """Return a folder that only this user can read, in XDG_RUNTIME_DIR where that is writable.

    Raises PermissionError for a folder of another owner or mode, OSError when it cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"tailrace-{os.getuid()}"
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        with contextlib.suppress(OSError):
            (Path(base) / "tailrace").mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = Path(base) / "tailrace"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of user {os.getuid()} with mode 0700")
    return folder


def announce(endpoints: Endpoints) -> Path:
    """Write the pair's file and return its path. Raises OSError."""
    path = runtime_folder() / f"embedded-{endpoints.supervisor_pid}.json"
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(asdict(endpoints)))
    scratch.replace(path)
    return path


def find_running() -> Endpoints | None:
    """Return the youngest pair that is still alive, or None."""
    try:
        files = sorted(runtime_folder().glob("embedded-*.json"))[:MAX_ENTRIES]
    except OSError:
        return None
    running = []
    for path in files:
        try:
            endpoints = Endpoints(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if start_ticks(endpoints.supervisor_pid) == endpoints.started_ticks:
            running.append(endpoints)
        else:
            path.unlink(missing_ok=True)
    return max(running, key=lambda endpoints: endpoints.started_ticks, default=None)


def start_ticks(pid: int) -> int | None:
    """Return when a process started; None when it does not run (a zombie does not)."""
    try:
        # The command name, in parentheses, may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _alive_without_proc(pid)
    except (OSError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _alive_without_proc(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except OSError:
        return None
    return 0
