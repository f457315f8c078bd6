"""Waiting, racing and backing off. Every wait here ends: at a limit, at an event, or at a cancellation that is kept."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import structlog

_log = structlog.get_logger(__name__)


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Returns whether the event was set within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def completes_before(
    event: asyncio.Event,
    work: Awaitable[object],
    *,
    grace_s: float = 0.0,
    report: Callable[[], None] | None = None,
    report_every_s: float | None = None,
) -> bool:
    """Runs `work` to its end unless `event` is set first; returns whether it ended, and raises what it raised.

    Work that loses the race, or whose caller is cancelled, gets `grace_s` to end by itself and is cancelled then; it
    has ended when this returns. `report` is called every `report_every_s` while neither has happened.
    """
    task = asyncio.ensure_future(work)
    stopped = asyncio.create_task(event.wait())
    try:
        while not task.done() and not stopped.done():
            done, _ = await asyncio.wait(
                {task, stopped}, timeout=report_every_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done and report is not None:
                report()
    finally:
        try:
            if grace_s and not task.done():
                await asyncio.wait({task}, timeout=grace_s)
        finally:  # The caller may be cancelled during the grace, too.
            completed = task.done()
            task.cancel()
            stopped.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)
    if completed:
        task.result()
    return completed


@contextmanager
def cancellation_kept() -> Iterator[None]:
    """Raises the CancelledError that the awaits inside have swallowed.

    redis-py and aiokafka use `asyncio.wait_for`, and before Python 3.12 that returns normally when a cancellation
    arrives just as the awaited operation completes: the task would then run forever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


class Backoff:
    """Doubles the wait after each failure, from `min_s` up to `max_s`; one success starts over.

    With `failure_event` it logs failures under that name, at most one per `log_every_s`, and the first success after
    one under `recovery_event`.
    """

    def __init__(
        self,
        min_s: float,
        max_s: float,
        *,
        failure_event: str | None = None,
        recovery_event: str | None = None,
        log_every_s: float = 0.0,
    ) -> None:
        self._min_s = min(min_s, max_s)
        self._max_s = max_s
        self._failure_event = failure_event
        self._recovery_event = recovery_event
        self._log_every_s = log_every_s
        self._num_failures = 0
        self._wait_s = self._min_s
        self._last_log_s = -log_every_s

    def succeeded(self) -> None:
        if self._num_failures and self._recovery_event is not None:
            _log.info(self._recovery_event, after_failures=self._num_failures)
        self._num_failures = 0
        self._wait_s = self._min_s
        self._last_log_s = -self._log_every_s

    def failed(self, error: BaseException | None = None) -> float:
        """Counts a failure; returns how many seconds to wait before the next attempt."""
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, self._max_s)
        self._num_failures += 1
        if self._failure_event is not None:
            self._report(self._failure_event, error, wait_s)
        return wait_s

    def _report(self, event: str, error: BaseException | None, wait_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_log_s >= self._log_every_s:
            self._last_log_s = now_s
            reason = str(error) or type(error).__name__
            _log.warning(event, reason=reason, failures=self._num_failures, retry_in_s=wait_s)
