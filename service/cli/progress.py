"""A progress bar on a terminal; nothing in a pipe, where it would only be noise."""

import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

T = TypeVar("T")


class Progress:
    """`with Progress("jobs", 100) as progress: progress.advance()`; drawn on standard error."""

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
        """The same items; those already done count at once."""
        for item in items:
            if is_done(item):
                self.advance()
            yield item
