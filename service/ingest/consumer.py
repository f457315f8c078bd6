"""Pulls jobs out of Kafka as credit allows, and commits them as they become complete, in any order."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import KafkaError

from service.errors import InternalError
from service.ingest.assignments import Assignments
from service.ingest.backpressure import CreditGate
from service.ingest.commits import Committer
from service.ingest.delivery import CallbackError, Callbacks, ConsumerStats, Delivery, TopicPartition
from service.ingest.kafka_clients import (
    close_consumer,
    generation_of,
    make_group_consumer,
    new_assignor,
    start_client,
)
from service.ingest.kafka_config import KafkaConfig
from service.ingest.poller import Poller, StalledError
from service.ingest.topics import ensure_topics
from service.waiting import Backoff, completes_before, wait_for

log = structlog.get_logger()

LEAVE_TIMEOUT_S = 5.0
REPORT_EVERY_S = 5.0
"""Time between two log events while the group is being joined."""
BACKOFF_S = 0.5


class _GroupMember(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types
    """Handles rebalances inside aiokafka's callbacks. They are short, because a member does not heartbeat meanwhile."""

    def __init__(self, assignments: Assignments, committer: Committer, callbacks: Callbacks) -> None:
        self._assignments = assignments
        self._committer = committer
        self._callbacks = callbacks
        self.consumer: AIOKafkaConsumer | None = None
        self.num_lost = 0
        self.num_assignments = 0

    async def on_partitions_revoked(self, revoked: Collection[KafkaPartition]) -> None:
        """Commits for the last time as the owner; the new owner starts from this commit."""
        if self.consumer is not None and revoked:
            await self._committer.commit(self.consumer)
        self._assignments.suspended = True

    async def on_partitions_assigned(self, assigned: Collection[KafkaPartition]) -> None:
        """Finds the lost partitions and pauses all; the poll loop restores and resumes them."""
        consumer = self.consumer
        if consumer is None:
            return
        lost = self._assignments.assign(
            [(tp.topic, tp.partition) for tp in assigned], generation_of(consumer)
        )
        # Pauses and positions start fresh with every assignment.
        consumer.pause(*assigned)
        for (topic, partition), _, offsets in self._assignments.active():
            consumer.seek(KafkaPartition(topic, partition), offsets.next_offset)
        self.num_lost += len(lost)
        self.num_assignments += 1
        log.info(
            "kafka_assigned",
            partitions=len(assigned),
            kept=sum(1 for _ in self._assignments.active()),
            lost=len(lost),
            assignment_epoch=self._assignments.epoch,
        )
        if lost:
            self._callbacks.lose(lost)


class JobConsumer:
    """One member of the consumer group, for the life of the process; used from one event loop.

    `on_deliveries` gets records to work on; each is incomplete until `complete()` is called with it, after its result
    is durable. `on_lost` gets partitions whose deliveries no longer count: other members do, or do again, what was in
    flight there. `credit` says how many more records could be served soon. The callbacks must return at once.
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
        self._member = _GroupMember(self._assignments, self._committer, callbacks)
        self._poller = Poller(config, self._assignments, self._committer, self._gate, callbacks)
        self._assignor = new_assignor()
        self._closing = asyncio.Event()
        self._finished = asyncio.Event()
        self._running: asyncio.Task[Any] | None = None
        self._given_up = False
        self._num_stale_completions = 0
        self._num_rebuilds = 0

    async def run(self) -> None:
        """Serves until close(); reconnects without limit. Raises only for a bug, ours or a callback's."""
        self._running = asyncio.current_task()
        backoff = Backoff(BACKOFF_S, self._config.retry_backoff_max_s)
        try:
            while not self._closing.is_set():
                started_s = time.monotonic()
                await self._serve_and_report()
                if time.monotonic() - started_s > 2 * self._config.retry_backoff_max_s:
                    backoff.succeeded()
                await wait_for(self._closing, backoff.failed())
        except asyncio.CancelledError:
            if not self._given_up:
                raise
        finally:
            self._finished.set()

    def complete(self, delivery: Delivery) -> None:
        """Marks a delivery whose result is durable: its offset may be committed. Stale deliveries are ignored."""
        if not self._assignments.complete(delivery):
            self._num_stale_completions += 1
        self._poller.wake.set()

    def wake(self) -> None:
        """Makes a paused consumer check its credit now, because it has changed."""
        self._poller.wake.set()

    async def stop(self) -> None:
        """Takes no further record (first step of a drain); stays in the group and keeps committing until close()."""
        self._poller.stopping = True
        self._poller.wake.set()

    async def close(self, timeout_s: float = 15.0) -> None:
        """Commits what is complete, leaves the group and ends run(); returns within `timeout_s` in any case."""
        self._poller.ending = True
        await self.stop()
        self._closing.set()
        if self._running is None:
            return
        if not await wait_for(self._finished, timeout_s) and not self._running.done():
            log.warning("kafka_close_timeout", timeout_s=timeout_s)
            self._given_up = True
            self._running.cancel()
            await asyncio.wait({self._running}, timeout=1.0)

    @property
    def ready(self) -> bool:
        """Tells whether records are fetched, or could be: a live connection alone is not enough."""
        return not self._closing.is_set() and self._poller.progressing

    def stats(self) -> ConsumerStats:
        return ConsumerStats(
            ready=self.ready,
            assigned_partitions=self._assignments.num_partitions,
            incomplete=self._assignments.num_incomplete,
            head_timestamp_ms=self._assignments.head_timestamp_ms,
            lag=self._poller.lag,
            paused=not self._gate.open,
            deliveries=self._poller.num_deliveries,
            skipped=self._poller.num_skipped,
            stale_completions=self._num_stale_completions,
            lost_partitions=self._member.num_lost + self._poller.num_restarted,
            assignments=self._member.num_assignments,
            commits=self._committer.num_commits,
            commit_failures=self._committer.num_failures,
            pauses=self._gate.num_closings,
            rebuilds=self._num_rebuilds,
        )

    async def _serve_and_report(self) -> None:
        where = {"bootstrap": self._config.kafka_bootstrap, "group": self._config.group_id}
        try:
            await self._serve()
        except CallbackError as error:
            raise InternalError(f"a consumer callback failed: {error.__cause__!r}") from error.__cause__
        except StalledError as error:
            self._num_rebuilds += 1
            log.error("kafka_fetch_stalled", reason=str(error), action="rebuilding the consumer", **where)
        except (KafkaError, OSError, TimeoutError) as error:
            log.warning("kafka_unavailable", error=str(error) or repr(error), action="retrying", **where)
        except Exception:
            self._num_rebuilds += 1
            log.exception("kafka_consumer_failed", action="rebuilding the consumer", **where)

    async def _serve(self) -> None:
        """Runs one aiokafka consumer from joining to leaving."""
        if self._config.create_topics:
            await completes_before(self._closing, ensure_topics(self._config))
        consumer = make_group_consumer(self._config, self._assignor, self._member)
        self._member.consumer = consumer
        joined = False
        try:
            joined = await completes_before(
                self._closing,
                start_client(consumer),
                report=self._report_joining,
                report_every_s=REPORT_EVERY_S,
            )
            if joined:
                log.info("kafka_joined", group=self._config.group_id, topic=self._config.jobs_topic)
                # A poll lasts as long as a rebalance; on closing it may be cancelled, because this consumer is never
                # polled again. What it has taken is registered and delivered without an await between.
                await completes_before(self._closing, self._poller.run(consumer))
        finally:
            await self._disconnect(consumer, joined=joined)

    async def _disconnect(self, consumer: AIOKafkaConsumer, *, joined: bool) -> None:
        if joined:
            await self._committer.commit(consumer)
        await close_consumer(consumer, LEAVE_TIMEOUT_S)
        self._assignments.disconnect()
        self._poller.disconnected()
        self._member.consumer = None

    def _report_joining(self) -> None:
        log.warning("kafka_joining", bootstrap=self._config.kafka_bootstrap, group=self._config.group_id)
