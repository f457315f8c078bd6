"""What commands print: tables and colours on a terminal, plain lines in a pipe, JSON where asked."""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import orjson

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine.

    SIGTERM unwinds it like Ctrl-C, and so does SIGINT where a shell had it ignored for a background job.
    """
    log_warnings()
    ended_by: list[signal.Signals] = []
    try:
        return asyncio.run(_interruptible(main, ended_by))
    except asyncio.CancelledError:
        if not ended_by:
            raise
        sys.exit(128 + ended_by[0])


def log_warnings() -> None:
    """Log lines, ours and those of libraries, go to standard error, warnings and up."""
    from service.log import configure_logging

    configure_logging("warning", "console" if sys.stderr.isatty() else "json")


async def _interruptible(main: Coroutine[Any, Any, T], ended_by: list[signal.Signals]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt(number: signal.Signals) -> None:
        ended_by.append(number)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, interrupt, signal.SIGTERM)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGINT, interrupt, signal.SIGINT)
    return await main


def print_json(value: Any) -> None:
    """One value, indented for people on a terminal."""
    option = orjson.OPT_INDENT_2 if sys.stdout.isatty() else 0
    sys.stdout.buffer.write(orjson.dumps(value, option=option | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.flush()


def print_json_line(value: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))
    sys.stdout.flush()


def note(message: str) -> None:
    """Something for people, beside the output."""
    print(message, file=sys.stderr, flush=True)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None, right: bool = False
) -> None:
    """A table on a terminal, else tab-separated lines; `right` aligns all but the first column."""
    if not sys.stdout.isatty():
        print("\t".join(columns))
        for row in rows:
            print("\t".join(str(cell) for cell in row))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if right and index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)
