"""Jobs that wait until the scheduler's queue has room for all of their requests. Event loop only."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from service.worker.job_run import JobRun


class Admission(Enum):
    """How a job left the queue."""

    ADMITTED = auto()
    LEFT = auto()
    LATE = auto()


@dataclass(slots=True)
class _Waiting:
    num_requests: int
    may_be_next: asyncio.Event = field(default_factory=asyncio.Event)
    has_left: bool = False


class AdmissionQueue:
    """Admits jobs in order of arrival, each once there is room for all of its requests. Bounded by intake credit.

    Credit should keep it empty, but the number of choices of a record is unknown until it is decoded, and preempted
    requests return to the scheduler's queue: a full queue is temporary and never a job's fault.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        """`room` returns how many more requests the scheduler would queue. No job may have more requests than its
        maximum."""
        self._room = room
        self._waiting: OrderedDict[JobRun, _Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, run: JobRun, num_requests: int, limit_s: float | None) -> Admission:
        """Waits for room; returns at once when no job waits and there is room. After ADMITTED the caller adds the
        requests before it awaits anything else. LEFT: `leave` was called. LATE: limit_s has passed."""
        if not self._waiting and num_requests <= self._room():
            return Admission.ADMITTED
        waiting = self._waiting[run] = _Waiting(num_requests)
        try:
            async with asyncio.timeout(limit_s):
                while not waiting.has_left and not self._is_first_and_fits(run):
                    waiting.may_be_next.clear()
                    await waiting.may_be_next.wait()
        except TimeoutError:
            return Admission.LEFT if waiting.has_left else Admission.LATE
        finally:
            del self._waiting[run]
            self.wake_next()  # the next job checks for room after this one has added its requests
        return Admission.LEFT if waiting.has_left else Admission.ADMITTED

    def leave(self, run: JobRun) -> None:
        """Removes a job from the queue, if it waits there."""
        waiting = self._waiting.get(run)
        if waiting is not None:
            waiting.has_left = True
            waiting.may_be_next.set()

    def wake_next(self) -> None:
        """Admits jobs if there is room. Call it after every step and whenever a request ends."""
        if self._waiting:
            first = next(iter(self._waiting))
            if self._is_first_and_fits(first):
                self._waiting[first].may_be_next.set()

    def _is_first_and_fits(self, run: JobRun) -> bool:
        is_first = next(iter(self._waiting)) is run
        return is_first and self._waiting[run].num_requests <= self._room()
