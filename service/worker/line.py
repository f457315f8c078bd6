"""Jobs that stand in line for places in the scheduler's queue. Event loop only."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from service.worker.job_run import JobRun


class Turn(Enum):
    """How a job came out of the line."""

    COME = auto()
    LEFT = auto()
    LATE = auto()


@dataclass(slots=True)
class _Standing:
    num_places: int
    called: asyncio.Event = field(default_factory=asyncio.Event)
    has_left: bool = False


class Line:
    """First come, first served, each with places for all of its requests at once. Bounded by intake credit.

    Credit keeps it empty as far as it can tell. But how many choices a record asks for is seen only when it is here,
    and preempted requests go back into the queue: a full queue is a moment's state of ours, never a job's fault.
    """

    def __init__(self, num_free_places: Callable[[], int]) -> None:
        """No job may ever ask for more places than the queue has."""
        self._num_free_places = num_free_places
        self._standing: OrderedDict[JobRun, _Standing] = OrderedDict()

    def __len__(self) -> int:
        return len(self._standing)

    async def stand(self, run: JobRun, num_places: int, limit_s: float | None) -> Turn:
        """Returns at once when nobody stands there and the places are free. After COME they are to be taken before
        anything else is awaited; LEFT: `leave` was called; LATE: limit_s is over."""
        if not self._standing and num_places <= self._num_free_places():
            return Turn.COME
        standing = self._standing[run] = _Standing(num_places)
        try:
            async with asyncio.timeout(limit_s):
                while not standing.has_left and not self._is_first_and_fits(run):
                    standing.called.clear()
                    await standing.called.wait()
        except TimeoutError:
            return Turn.LEFT if standing.has_left else Turn.LATE
        finally:
            del self._standing[run]
            self.call_next()  # who looks for itself, after this job has taken its places
        return Turn.LEFT if standing.has_left else Turn.COME

    def leave(self, run: JobRun) -> None:
        """The job wants no places any more; nothing happens if it does not stand here."""
        standing = self._standing.get(run)
        if standing is not None:
            standing.has_left = True
            standing.called.set()

    def call_next(self) -> None:
        """Places may have become free: to be called after every step and after every end of a request."""
        if self._standing:
            first = next(iter(self._standing))
            if self._is_first_and_fits(first):
                self._standing[first].called.set()

    def _is_first_and_fits(self, run: JobRun) -> bool:
        is_first = next(iter(self._standing)) is run
        return is_first and self._standing[run].num_places <= self._num_free_places()
