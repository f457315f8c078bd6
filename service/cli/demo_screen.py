"""The demo's screen: shows running streams and a progress bar on a terminal, plain lines in a pipe."""

import sys
import textwrap
from collections import OrderedDict
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

MAX_LINES = 12
LINE_CHARS = 72
LABEL_CHARS = 28
KEPT_CHARS = 500


class Screen(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def text(self, label: str, text: str) -> None: ...
    def ended(self, label: str) -> None: ...
    def document(self, name: str, summary: str) -> None: ...


def make_screen(num_documents: int) -> Screen:
    return TerminalScreen(num_documents) if sys.stdout.isatty() else PlainScreen(num_documents)


class PlainScreen:
    """Prints a line of a stream when it is full: `part of a document | text`."""

    def __init__(self, num_documents: int) -> None:
        self._num_documents = num_documents
        self._num_done = 0
        self._pending: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout.flush()

    def text(self, label: str, text: str) -> None:
        pending = self._pending.get(label, "") + text.replace("\n", " ")
        if len(pending) >= LINE_CHARS:
            self._print(label, pending)
            pending = ""
        self._pending[label] = pending

    def ended(self, label: str) -> None:
        pending = self._pending.pop(label, "")
        if pending:
            self._print(label, pending)

    def document(self, name: str, summary: str) -> None:
        self._num_done += 1
        print(
            f"[{self._num_done}/{self._num_documents}] {name}\n{textwrap.indent(textwrap.fill(summary, 100), '    ')}"
        )
        sys.stdout.flush()

    def _print(self, label: str, text: str) -> None:
        print(f"{label[:LABEL_CHARS]:{LABEL_CHARS}} | {text}", flush=True)


class TerminalScreen:
    """Shows the last words of each running stream above the bar; finished summaries scroll away above them."""

    def __init__(self, num_documents: int) -> None:
        self._console = Console()
        self._streams: OrderedDict[str, str] = OrderedDict()
        self._progress = Progress(
            TextColumn("documents"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("documents", total=num_documents)
        self._live = Live(
            get_renderable=self._draw, console=self._console, refresh_per_second=12, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def text(self, label: str, text: str) -> None:
        self._streams[label] = (self._streams.get(label, "") + text.replace("\n", " "))[-KEPT_CHARS:]

    def ended(self, label: str) -> None:
        self._streams.pop(label, None)

    def document(self, name: str, summary: str) -> None:
        self._progress.advance(self._task)
        self._console.print(Text(name, style="bold"))
        self._console.print(Text(textwrap.indent(textwrap.fill(summary, 90), "  ")))

    def _draw(self) -> Group:
        width = max(20, self._console.width - LABEL_CHARS - 4)
        lines = [
            Text.assemble((f"{label[:LABEL_CHARS]:{LABEL_CHARS}}  ", "dim"), text[-width:])
            for label, text in list(self._streams.items())[-MAX_LINES:]
        ]
        return Group(*lines, self._progress)
