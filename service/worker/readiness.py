"""Is the process sound, and does work move? Progress counts, not connections."""

import time
from collections.abc import Callable, Mapping

from service.engine.engine import Engine
from service.ingest.consumer import JobConsumer
from service.ingest.producer import ResultProducer
from service.stream.publisher import StreamPublisher

STALLED_AFTER_S = 30.0
"""A step that has not come back for this long, or work that got no step."""


class Readiness:
    """Answers the probes; before `watch` is called the worker is loading."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: tuple[Engine, JobConsumer, StreamPublisher, ResultProducer] | None = None
        self.draining = False
        self.broken: str | None = None

    def watch(
        self, engine: Engine, consumer: JobConsumer, publisher: StreamPublisher, producer: ResultProducer
    ) -> None:
        self._parts = (engine, consumer, publisher, producer)

    def health(self) -> Mapping[str, str]:
        """Why the process should be replaced; empty: it should not."""
        reasons: dict[str, str] = {}
        if self.broken is not None:
            reasons["worker"] = self.broken
        stalled = self._stalled()
        if stalled is not None:
            reasons["engine"] = stalled
        return reasons

    def reasons(self) -> Mapping[str, str]:
        """Why no work moves; empty: the worker is ready."""
        reasons = dict(self.health())
        if self._parts is None:
            reasons["model"] = "loading"
            return reasons
        _, consumer, publisher, producer = self._parts
        if self.draining:
            reasons["worker"] = "draining"
        if not consumer.ready:
            reasons["kafka"] = "the consumer makes no progress: not connected, joining the group, or stalled"
        elif not producer.ready:
            reasons["kafka"] = "the results producer is not connected"
        if not publisher.healthy:
            reasons["redis"] = "no round trip succeeds"
        return reasons

    def _stalled(self) -> str | None:
        """Names what holds the engine up."""
        if self._parts is None:
            return None
        engine = self._parts[0]
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
