"""An asyncio event loop in virtual time, for several processes that live in it together.

Time stands still while callbacks run and jumps to the next timer when none is due. Every callback belongs to the
process in whose context it was scheduled; a process can be frozen (its callbacks wait, as after SIGSTOP) or dead (they
never run). Nothing here waits in real time, uses a socket or a thread.
"""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from enum import Enum, auto
from typing import Any

WALL_START_S = 1_790_000_000.0
"""Seconds since 1970 at the loop's time 0."""
MAX_CALLBACKS = 400_000
"""Of one schedule; more mean that something runs in circles without time passing."""
MAX_TIMERS_KEPT = 100


class State(Enum):
    RUNNING = auto()
    FROZEN = auto()
    DEAD = auto()


class Process:
    """A simulated process: the owner of callbacks."""

    def __init__(self, name: str, clock_offset_s: float = 0.0) -> None:
        self.name = name
        self.clock_offset_s = clock_offset_s
        """How wrong its wall clock is, in seconds."""
        self.state = State.RUNNING
        self.parked: list[asyncio.Handle] = []
        """Callbacks that became due while it was frozen or after it died. Those of the dead are kept, so that their
        coroutines are closed at the end of the schedule and not in the middle of it."""

    def __repr__(self) -> str:
        return self.name


OWNER: ContextVar[Process | None] = ContextVar("OWNER", default=None)


class StuckError(Exception):
    """No callback is left, or far too many ran: the simulation cannot go on."""


class VirtualLoop(asyncio.BaseEventLoop):
    _ready: deque[Any]
    _scheduled: list[Any]
    _timer_cancelled_count: int

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_callbacks = 0
        self.num_callbacks_limit: int | None = MAX_CALLBACKS
        self.neutral = copy_context()
        """The context of the network and the servers: no process owns it."""
        self.neutral.run(OWNER.set, None)

    def time(self) -> float:
        return self.now_s

    def at(self, when_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Schedules a callback of the network or of a server."""
        return self.call_at(when_s, callback, *args, context=self.neutral)

    def later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay_s, callback, *args, context=self.neutral)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Runs `func` at once; its answer arrives as if a thread had given it."""
        future = self.create_future()
        try:
            outcome, failure = func(*args), None
        except Exception as error:
            outcome, failure = None, error

        def settle() -> None:
            if not future.done():
                future.set_exception(failure) if failure is not None else future.set_result(outcome)

        self.call_soon(settle)
        return future

    def freeze(self, process: Process) -> None:
        if process.state is State.RUNNING:
            process.state = State.FROZEN

    def resume(self, process: Process) -> None:
        """What became due meanwhile runs now, in the order in which it became due."""
        if process.state is State.FROZEN:
            process.state = State.RUNNING
            self._ready.extend(process.parked)
            process.parked = []

    def kill(self, process: Process) -> None:
        """As kill -9 between two awaits."""
        process.state = State.DEAD

    def bury(self, processes: list[Process]) -> None:
        """Lets what is left of frozen and dead processes run, so that it can be cancelled."""
        for process in processes:
            process.state = State.RUNNING
            self._ready.extend(process.parked)
            process.parked = []

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        if not ready:
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
                self._timer_cancelled_count -= 1
            if not scheduled:
                raise StuckError("no callback is left")
            self.now_s = max(self.now_s, scheduled[0]._when)
        self._drop_cancelled_timers()
        now_s = self.now_s
        while scheduled and scheduled[0]._when <= now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
            if handle._cancelled:
                self._timer_cancelled_count -= 1
        self.num_callbacks += len(ready)
        if self.num_callbacks_limit is not None and self.num_callbacks > self.num_callbacks_limit:
            raise StuckError(f"{self.num_callbacks} callbacks ran and the schedule has not ended")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            owner = handle._context.get(OWNER)
            if owner is not None and owner.state is not State.RUNNING:
                owner.parked.append(handle)
                continue
            handle._run()

    def _drop_cancelled_timers(self) -> None:
        if self._timer_cancelled_count > MAX_TIMERS_KEPT and 2 * self._timer_cancelled_count > len(
            self._scheduled
        ):
            kept = [handle for handle in self._scheduled if not handle._cancelled]
            for handle in self._scheduled:
                handle._scheduled = not handle._cancelled
            heapq.heapify(kept)
            self._scheduled[:] = kept
            self._timer_cancelled_count = 0

    def _process_events(self, event_list: Any) -> None:
        raise NotImplementedError("nothing here selects")

    def _write_to_self(self) -> None:
        """Nothing sleeps, so nothing has to be woken."""


class VirtualTime:
    """Takes the place of the clocks in the module `time` during a schedule."""

    NAMES = ("monotonic", "time", "perf_counter")

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._real = {name: getattr(time, name) for name in self.NAMES}

    def __enter__(self) -> "VirtualTime":
        for name in self.NAMES:
            setattr(time, name, getattr(self, name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(time, name, real)

    def monotonic(self) -> float:
        return self._loop.now_s

    perf_counter = monotonic

    def time(self) -> float:
        """Seconds since 1970 by the clock of the process that asks."""
        owner = OWNER.get()
        return WALL_START_S + self._loop.now_s + (owner.clock_offset_s if owner is not None else 0.0)


def context_of(process: Process) -> Context:
    """Returns a context whose callbacks and tasks belong to the process."""
    context = copy_context()
    context.run(OWNER.set, process)
    return context
