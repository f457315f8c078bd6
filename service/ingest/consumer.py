"""Pulls jobs out of Kafka as credit allows, and commits them as they become complete, in any order."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from service.errors import InternalError
from service.ingest.assignments import Assignments
from service.ingest.callbacks import CallbackError, Callbacks
from service.ingest.committer import Committer
from service.ingest.config import KafkaConfig
from service.ingest.connection import leave, make_consumer, new_assignor
from service.ingest.delivery import ConsumerStats, Delivery, TopicPartition
from service.ingest.flow import CreditGate
from service.ingest.membership import Membership
from service.ingest.poller import Poller, StalledError
from service.ingest.topics import ensure_topics

log = structlog.get_logger()

LEAVE_TIMEOUT_S = 5.0
PROGRESS_LINE_S = 5.0
"""While the group is being joined, one line in the log this often."""


class JobConsumer:
    """One member of the consumer group, for the life of the process; used from one event loop.

    `on_deliveries` gets records to work on; each is incomplete until `complete()` is called with it, after
    its terminal record is durable. `on_lost` gets partitions whose deliveries no longer count: others will
    do, or do again, what was in flight there. `credit` says how many more records could be served soon. The
    callbacks must return at once.
    """

    def __init__(
        self,
        config: KafkaConfig,
        *,
        on_deliveries: Callable[[Sequence[Delivery]], None],
        on_lost: Callable[[Sequence[TopicPartition]], None],
        credit: Callable[[], int],
    ) -> None:
        self._config = config
        self._assignments = Assignments()
        self._committer = Committer(self._assignments, config.commit_timeout_s)
        self._gate = CreditGate(config.resume_credit)
        callbacks = Callbacks(on_deliveries, on_lost, credit)
        self._membership = Membership(self._assignments, self._committer, callbacks)
        self._poller = Poller(config, self._assignments, self._committer, self._gate, callbacks)
        self._assignor = new_assignor()
        self._closing = asyncio.Event()
        self._finished = asyncio.Event()
        self._running: asyncio.Task[Any] | None = None
        self._given_up = False
        self._stale_completions = 0
        self._rebuilds = 0

    async def run(self) -> None:
        """Serves until close(); reconnects for ever. Raises only for a bug, ours or a callback's."""
        self._running = asyncio.current_task()
        backoff_s = min(0.5, self._config.retry_backoff_max_s)
        try:
            while not self._closing.is_set():
                started_s = time.monotonic()
                await self._serve_and_report()
                if time.monotonic() - started_s > 2 * self._config.retry_backoff_max_s:
                    backoff_s = min(0.5, self._config.retry_backoff_max_s)
                await _wait(self._closing, backoff_s)
                backoff_s = min(2 * backoff_s, self._config.retry_backoff_max_s)
        except asyncio.CancelledError:
            if not self._given_up:
                raise
        finally:
            self._finished.set()

    def complete(self, delivery: Delivery) -> None:
        """The terminal record of this delivery is durable: its offset may be committed. Stale ones are
        ignored."""
        if not self._assignments.complete(delivery):
            self._stale_completions += 1
        self._poller.wake.set()

    def wake(self) -> None:
        """Credit has changed: a paused consumer looks at it now."""
        self._poller.wake.set()

    async def stop(self) -> None:
        """Takes no further record (first step of a drain); stays in the group and goes on committing until
        close()."""
        self._poller.stopping = True
        self._poller.wake.set()

    async def close(self, timeout_s: float = 15.0) -> None:
        """Commits what is complete, leaves the group and ends run(); returns within `timeout_s`, whatever
        happens."""
        self._poller.ending = True
        await self.stop()
        self._closing.set()
        if self._running is None:
            return
        if not await _wait(self._finished, timeout_s) and not self._running.done():
            log.warning("kafka_close_timeout", timeout_s=timeout_s)
            self._given_up = True
            self._running.cancel()
            await asyncio.wait({self._running}, timeout=1.0)

    @property
    def ready(self) -> bool:
        """Whether records move, or could: a live connection alone is not enough."""
        return not self._closing.is_set() and self._poller.progressing

    def stats(self) -> ConsumerStats:
        return ConsumerStats(
            ready=self.ready,
            assigned_partitions=self._assignments.num_partitions,
            incomplete=self._assignments.num_incomplete,
            head_timestamp_ms=self._assignments.head_timestamp_ms,
            lag=self._poller.lag,
            paused=not self._gate.open,
            deliveries=self._poller.deliveries,
            skipped=self._poller.skipped,
            stale_completions=self._stale_completions,
            lost_partitions=self._membership.lost + self._poller.restarted,
            assignments=self._membership.assignments_seen,
            commits=self._committer.commits,
            commit_failures=self._committer.failures,
            pauses=self._gate.closings,
            rebuilds=self._rebuilds,
        )

    async def _serve_and_report(self) -> None:
        where = {"bootstrap": self._config.bootstrap, "group": self._config.group_id}
        try:
            await self._serve()
        except CallbackError as error:
            raise InternalError(f"a consumer callback failed: {error.__cause__!r}") from error.__cause__
        except StalledError as error:
            self._rebuilds += 1
            log.error("kafka_fetch_stalled", reason=str(error), action="rebuilding the consumer", **where)
        except (KafkaError, OSError, TimeoutError) as error:
            log.warning("kafka_unavailable", error=str(error) or repr(error), action="retrying", **where)
        except Exception:
            self._rebuilds += 1
            log.exception("kafka_consumer_failed", action="rebuilding the consumer", **where)

    async def _serve(self) -> None:
        """One consumer from joining to leaving."""
        if self._config.create_topics:
            await self._unless_closing(ensure_topics(self._config))
        consumer = make_consumer(self._config, self._assignor, self._membership)
        self._membership.consumer = consumer
        joined = False
        try:
            joined = await self._unless_closing(consumer.start(), report="kafka_joining")
            if joined:
                log.info("kafka_joined", group=self._config.group_id, topic=self._config.jobs_topic)
                # A poll lasts as long as a rebalance; on closing it may be cancelled, because this consumer
                # is never polled again. What it has taken is registered and delivered without an await
                # between.
                await self._unless_closing(self._poller.run(consumer))
        finally:
            await self._disconnect(consumer, joined=joined)

    async def _disconnect(self, consumer: AIOKafkaConsumer, *, joined: bool) -> None:
        if joined:
            await self._committer.commit(consumer)
        await leave(consumer, LEAVE_TIMEOUT_S)
        self._assignments.disconnect()
        self._poller.disconnected()
        self._membership.consumer = None

    async def _unless_closing(
        self, coroutine: Coroutine[Any, Any, Any], *, report: str | None = None
    ) -> bool:
        """Runs to the end and returns True; on close() cancels it and returns False."""
        task = asyncio.create_task(coroutine)
        closing = asyncio.create_task(self._closing.wait())
        try:
            while not task.done() and not closing.done():
                done, _ = await asyncio.wait(
                    {task, closing}, timeout=PROGRESS_LINE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done and report:
                    log.warning(report, bootstrap=self._config.bootstrap, group=self._config.group_id)
            if task.done():
                await task
            return task.done()
        finally:
            closing.cancel()
            task.cancel()
            await asyncio.gather(task, closing, return_exceptions=True)


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
