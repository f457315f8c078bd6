"""Tells whether the process is healthy and work makes progress; open connections alone do not count."""

import time
from collections.abc import Callable, Mapping

from service.worker.assembly import Parts

STALLED_AFTER_S = 30.0
"""Limit for a step without a result, and for work without a step."""


class Readiness:
    """Answers the probes; the worker is loading until `watch` is called."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: Parts | None = None
        self.draining = False
        self.broken: str | None = None

    def watch(self, parts: Parts) -> None:
        self._parts = parts

    def health(self) -> Mapping[str, str]:
        """Return reasons to replace the process; empty: healthy."""
        reasons: dict[str, str] = {}
        if self.broken is not None:
            reasons["worker"] = self.broken
        stalled = self._stalled()
        if stalled is not None:
            reasons["engine"] = stalled
        return reasons

    def reasons(self) -> Mapping[str, str]:
        """Return why work makes no progress; empty: the worker is ready."""
        reasons = dict(self.health())
        if self._parts is None:
            reasons["model"] = "loading"
            return reasons
        if self.draining:
            reasons["worker"] = "draining"
        kafka, redis = _kafka_problem(self._parts), _redis_problem(self._parts)
        if kafka is not None:
            reasons["kafka"] = kafka
        if redis is not None:
            reasons["redis"] = redis
        return reasons

    def _stalled(self) -> str | None:
        """Name what blocks the engine."""
        if self._parts is None:
            return None
        engine = self._parts.engine
        idle_s = self._clock() - engine.last_progress_s
        if not engine.scheduler.has_work or idle_s < STALLED_AFTER_S:
            return None
        blocked = engine.scheduler.stats().blocked
        if blocked is None:
            return f"a step has been running for {idle_s:.0f} s"
        return (
            f"no step for {idle_s:.0f} s: request {blocked.request_id} waits for {blocked.reason.value}, needs "
            f"{blocked.needed_blocks} blocks, {blocked.available_blocks} are available"
        )


def _kafka_problem(parts: Parts) -> str | None:
    if not parts.consumer.ready:
        return "the consumer makes no progress: not connected, joining the group, or stalled"
    if parts.producer.problem is not None:
        return parts.producer.problem
    return None if parts.producer.ready else "the results producer is not connected"


def _redis_problem(parts: Parts) -> str | None:
    if not parts.publisher.healthy:
        return f"no round trip succeeds: {parts.publisher.stats().problem or 'not connected yet'}"
    if not parts.listener.listening.is_set():
        return f"cancellations are not heard: {parts.listener.problem or 'not subscribed yet'}"
    return None if parts.claim.held else "the namespace is not claimed yet"
