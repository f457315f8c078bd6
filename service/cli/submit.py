"""`tailrace submit`."""

import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import typer

from service.cli.console import Progress, note, print_json_line, run
from service.client import Client, client_settings
from service.errors import SettingsError
from service.pipelines.job_file import COMPLETED, BatchRun, Counts, Line, read_lines
from service.pipelines.rows import Row, RowFile


class StdoutRows:
    """Prints rows to standard output, so that there is nothing to resume from."""

    def __init__(self) -> None:
        self.kept: dict[str, Row] = {}
        self.attempts: dict[str, int] = {}

    def append(self, row: Row) -> None:
        print_json_line(row)


def submit(file: Path, *, wait: bool, output: Path | None, in_flight: int, retry_failed: bool) -> None:
    """Publish a file of jobs; exit code 1 when a line or a job fails. Raises SettingsError and DependencyError."""
    if output is not None and not wait:
        raise SettingsError("-o needs --wait: without it there are no results to write")
    if retry_failed and output is None:
        raise SettingsError(
            "--retry-failed needs -o: failed rows are looked up in the output of an earlier run"
        )
    with ExitStack() as stack:
        source = stack.enter_context(_open(file))
        if not wait:
            good = run(_publish(source, in_flight))
        else:
            redo = (lambda row: row.get("status") != COMPLETED) if retry_failed else (lambda _row: False)
            rows = stack.enter_context(RowFile(output, redo=redo)) if output else StdoutRows()
            good = run(_collect(source, rows, in_flight, _size(file)))
    if not good:
        raise typer.Exit(1)


def _open(file: Path) -> IO[bytes]:
    if str(file) == "-":
        return sys.stdin.buffer
    try:
        return file.open("rb")
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}") from error


def _size(file: Path) -> int | None:
    """Count the lines, when that can be known beforehand."""
    if str(file) == "-" or not file.is_file():
        return None
    with file.open("rb") as lines:
        return sum(1 for line in lines if not line.isspace())


async def _collect(source: IO[bytes], rows: RowFile | StdoutRows, in_flight: int, total: int | None) -> bool:
    settings = client_settings()
    lines = read_lines(source, model=settings.model, max_bytes=settings.max_job_bytes)
    async with Client(settings) as client:
        with Progress("jobs", total) as progress:
            batch = BatchRun(client, rows, in_flight=in_flight, on_row=lambda _status: progress.advance())
            try:
                counts = await batch.run(progress.skipping(lines, lambda line: line.key in rows.kept))
            except asyncio.CancelledError:
                note("interrupted: the same command goes on where this one stopped")
                raise
    _report(counts)
    return counts.all_good


def _report(counts: Counts) -> None:
    parts = [f"{number} {status}" for status, number in sorted(counts.by_status.items())]
    skipped = f" ({counts.num_skipped} of them in an earlier run)" if counts.num_skipped else ""
    note(f"{', '.join(parts) or 'no jobs'}{skipped}")


async def _publish(source: IO[bytes], in_flight: int) -> bool:
    """Publish every good line, at most `in_flight` unacknowledged, and report the bad ones."""
    settings = client_settings()
    num_published = num_bad = 0
    async with Client(settings) as client:
        pending: set[asyncio.Task[None]] = set()
        for line in read_lines(source, model=settings.model, max_bytes=settings.max_job_bytes):
            if line.job is None:
                num_bad += 1
                _complain(line)
                continue
            pending.add(asyncio.create_task(client.publish(line.job.id, line.value)))
            num_published += 1
            if len(pending) >= in_flight:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        await asyncio.gather(*pending)
    print(f"{num_published} jobs published on {settings.jobs_topic}")
    return not num_bad


def _complain(line: Line) -> None:
    assert line.error is not None
    note(f"line {line.number}: {line.error.message}")
