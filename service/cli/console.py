"""Prints what commands show: tables and progress on a terminal, plain lines in a pipe, JSON where asked."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import orjson

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine.

    SIGTERM cancels it as Ctrl-C does, and so does SIGINT where a shell had it ignored for a background job.
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
    """Send log lines from warnings up, libraries' included, to standard error."""
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
    """Print one value as JSON, indented on a terminal."""
    option = orjson.OPT_INDENT_2 if sys.stdout.isatty() else 0
    sys.stdout.buffer.write(orjson.dumps(value, option=option | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.flush()


def print_json_line(value: Any) -> None:
    """Print one value as one line of JSON."""
    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))
    sys.stdout.flush()


def note(message: str) -> None:
    """Print a line for people on standard error, beside the output."""
    print(message, file=sys.stderr, flush=True)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None, right: bool = False
) -> None:
    """Print a table on a terminal, else tab-separated lines; `right` aligns all but the first column."""
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


class Progress:
    """Draws a progress bar on standard error, where that is a terminal.

    Usage: `with Progress("jobs", 100) as progress: progress.advance()`.
    """

    def __init__(self, what: str, total: int | None) -> None:
        self._what = what
        self._total = total
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)

    def skipping(self, items: Iterator[T], is_done: Callable[[T], bool]) -> Iterator[T]:
        """Yield the same items and count those already done at once."""
        for item in items:
            if is_done(item):
                self.advance()
            yield item
