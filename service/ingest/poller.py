"""Runs the poll loop of one AIOKafkaConsumer: restore, take what credit allows, commit, watch for progress."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import IllegalStateError, KafkaError

from service.ingest.assignments import Assignments, starting_point
from service.ingest.backpressure import CreditGate, ProgressWatchdog
from service.ingest.commits import Committer, fetch_committed
from service.ingest.delivery import Callbacks, Delivery, TopicPartition
from service.ingest.kafka_clients import NO_PARTITION, repair_header_names
from service.ingest.kafka_config import KafkaConfig
from service.ingest.offsets import PartitionOffsets
from service.waiting import wait_for

log = structlog.get_logger()

ASK_TIMEOUT_S = 5.0
"""Limit of one question to the broker; the poll loop waits for the answer."""
RESTORE_RETRY_S = 0.5
NOT_READY_AFTER_CHECKS = 3


class StalledError(Exception):
    """The log holds records, fetching them is allowed, and none arrives."""


class Poller:
    def __init__(
        self,
        config: KafkaConfig,
        assignments: Assignments,
        committer: Committer,
        gate: CreditGate,
        callbacks: Callbacks,
    ) -> None:
        self._config = config
        self._assignments = assignments
        self._committer = committer
        self._gate = gate
        self._callbacks = callbacks
        self._watchdog = ProgressWatchdog(config.stall_timeout_s)
        self._next_commit_s = self._next_check_s = self._next_restore_s = 0.0
        self._verified_s: float | None = None
        self._num_polls = 0
        self.wake = asyncio.Event()
        self.stopping = self.ending = False
        self.lag = self.num_deliveries = self.num_skipped = self.num_restarted = 0

    @property
    def progressing(self) -> bool:
        limit_s = NOT_READY_AFTER_CHECKS * self._config.check_interval_s
        return self._verified_s is not None and time.monotonic() - self._verified_s <= limit_s

    def disconnected(self) -> None:
        self._verified_s = None
        self._next_check_s = self._next_restore_s = 0.0
        self._watchdog.reset()

    async def run(self, consumer: AIOKafkaConsumer) -> None:
        """Polls until cancelled; raises StalledError, CallbackError or what aiokafka raises.

        `ending` is set before it is cancelled: somewhere below aiokafka a cancellation can get lost.
        """
        while not self.ending:
            self._callbacks.check()
            await self._restore(consumer)
            self.wake.clear()
            credit = 0 if self.stopping else self._callbacks.credit()
            fetchable = self._steer(consumer, credit)
            await self._take(consumer, fetchable, credit)
            if time.monotonic() >= self._next_commit_s:
                await self._committer.commit(consumer)
                self._next_commit_s = time.monotonic() + self._config.commit_interval_s
            if time.monotonic() >= self._next_check_s:
                await self._check(consumer, fetchable)
                self._next_check_s = time.monotonic() + self._config.check_interval_s

    def _steer(self, consumer: AIOKafkaConsumer, credit: int) -> list[TopicPartition]:
        """Pauses and resumes; returns the partitions to take from, in fair order."""
        fetchable: list[TopicPartition] = []
        if self._gate.update(credit, self._assignments.num_incomplete) and not self._assignments.suspended:
            fetchable = [p for p, _, offsets in self._assignments.active() if not offsets.under_pressure]
        wanted = {KafkaPartition(*partition) for partition in fetchable}
        assigned = consumer.assignment()
        consumer.pause(*(assigned - wanted))
        consumer.resume(*(assigned & wanted))
        self._num_polls += 1
        start = self._num_polls % len(fetchable) if fetchable else 0
        return fetchable[start:] + fetchable[:start]

    async def _take(self, consumer: AIOKafkaConsumer, fetchable: list[TopicPartition], credit: int) -> None:
        """Polls always: the group evicts a member that does not poll, even an idle or a full one.

        Never cancels a getmany(): that would switch max_poll_interval off silently.
        """
        if not fetchable:
            await wait_for(self.wake, self._config.poll_timeout_s)
            await consumer.getmany(NO_PARTITION, timeout_ms=0)
            return
        left = min(credit, self._config.max_poll_records)
        share = max(1, left // len(fetchable))
        taken = 0
        for partition in fetchable:
            if taken < left:
                count = min(share, left - taken)
                taken += self._accept(consumer, await self._poll(consumer, [partition], 0, count))
        if taken == 0:
            await self._take_any(consumer, fetchable, left)

    async def _take_any(
        self, consumer: AIOKafkaConsumer, fetchable: list[TopicPartition], limit: int
    ) -> None:
        timeout_ms = round(self._config.poll_timeout_s * 1000)
        records = await self._poll(consumer, fetchable, timeout_ms, limit)
        if self._accept(consumer, records) == 0:
            self._watchdog.empty_poll(fetchable)

    async def _poll(
        self, consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition], timeout_ms: int, limit: int
    ) -> dict[KafkaPartition, list[Any]]:
        """Calls getmany() once. A record whose header names are not UTF-8 is fetched again, repaired."""
        keys = [KafkaPartition(*partition) for partition in partitions]
        try:
            fetched: dict[KafkaPartition, list[Any]] = await consumer.getmany(
                *keys, timeout_ms=timeout_ms, max_records=limit
            )
        except UnicodeDecodeError as error:
            log.warning("kafka_header_name_unreadable", partitions=partitions, error=str(error))
            repair_header_names(consumer, partitions)
            # aiokafka loses the records that it had read before it raised.
            for partition, key in zip(partitions, keys, strict=True):
                offsets = self._assignments.offsets(partition)
                if offsets is not None and not self._assignments.suspended:
                    consumer.seek(key, offsets.position)
            return {}
        return fetched

    def _accept(self, consumer: AIOKafkaConsumer, fetched: dict[KafkaPartition, list[Any]]) -> int:
        """Registers and hands over; no await between the poll and here, so the assignment is the poll's."""
        deliveries: list[Delivery] = []
        count = 0
        for tp, records in fetched.items():
            count += len(records)
            partition = (tp.topic, tp.partition)
            offsets = self._assignments.offsets(partition)
            if offsets is None or self._assignments.suspended:
                continue  # not restored yet: restoring seeks to where fetching starts
            if self.stopping:
                consumer.seek(tp, records[0].offset)
                continue
            if records[0].offset < offsets.position:
                offsets = self._restart(partition, records[0].offset, offsets.position)
            deliveries += self._register(offsets, records)
        if deliveries:
            self.num_deliveries += len(deliveries)
            self._callbacks.deliver(deliveries)
        return count

    def _register(self, offsets: PartitionOffsets, records: Sequence[Any]) -> list[Delivery]:
        epoch = self._assignments.epoch
        fresh = [record for record in records if offsets.register(record.offset, record.timestamp)]
        self.num_skipped += len(records) - len(fresh)
        return [
            Delivery(r.topic, r.partition, r.offset, epoch, r.key, r.value, tuple(r.headers), r.timestamp)
            for r in fresh
        ]

    def _restart(self, partition: TopicPartition, offset: int, expected: int) -> PartitionOffsets:
        """Restarts a partition whose log was cut or recreated: only then does fetching move back, because the broker
        refused our position."""
        log.error(
            "kafka_log_rewound", topic=partition[0], partition=partition[1], offset=offset, expected=expected
        )
        offsets = PartitionOffsets(offset)
        self._assignments.restart(partition, offsets)
        self.num_restarted += 1
        self._callbacks.lose([partition])
        return offsets

    async def _restore(self, consumer: AIOKafkaConsumer) -> None:
        """Gives new partitions their starting point: the former owner's commit and map."""
        partitions = self._assignments.unrestored()
        if not partitions or self._assignments.suspended or time.monotonic() < self._next_restore_s:
            return
        epoch = self._assignments.epoch
        keys = [KafkaPartition(*partition) for partition in partitions]
        try:
            async with asyncio.timeout(2 * ASK_TIMEOUT_S):
                committed = await fetch_committed(self._config, partitions)
                beginnings = await consumer.beginning_offsets(keys)
                ends = await consumer.end_offsets(keys)
            if self._assignments.epoch != epoch or self._assignments.suspended:
                return  # there was another rebalance meanwhile
            for partition, key in zip(partitions, keys, strict=True):
                found = committed[partition]
                offsets = starting_point(found.offset, found.completed, beginnings[key], ends[key])
                consumer.seek(key, offsets.next_offset)
                self._assignments.restore(partition, offsets, found.value)
        except (KafkaError, IllegalStateError, TimeoutError, OSError) as error:
            log.warning(
                "kafka_restore_failed", error=repr(error), partitions=len(partitions), action="retrying"
            )
            self._next_restore_s = time.monotonic() + RESTORE_RETRY_S

    async def _check(self, consumer: AIOKafkaConsumer, fetchable: Sequence[TopicPartition]) -> None:
        """Asks the broker how far the logs go: proves the connection, measures lag, finds a dead fetcher."""
        active = {partition: offsets for partition, _, offsets in self._assignments.active()}
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                if not active:
                    await fetch_committed(self._config, [(self._config.jobs_topic, 0)])
                ends = await consumer.end_offsets([KafkaPartition(*partition) for partition in active])
                positions = {p: await consumer.position(KafkaPartition(*p)) for p in active}
        except IllegalStateError:
            return  # there was a rebalance meanwhile
        except (KafkaError, TimeoutError, OSError) as error:
            log.warning("kafka_check_failed", error=repr(error))
            return
        if self._assignments.suspended or any(
            self._assignments.offsets(p) is not o for p, o in active.items()
        ):
            return
        for partition, offsets in active.items():
            offsets.advance(positions[partition])
        end_of = {(tp.topic, tp.partition): end for tp, end in ends.items()}
        self.lag = sum(max(0, end_of[p] - position) for p, position in positions.items())
        stalled = self._watchdog.observe(time.monotonic(), positions, end_of, fetchable)
        if stalled is not None:
            raise StalledError(
                f"partition {stalled[1]} of {stalled[0]} stays at offset {positions[stalled]}"
                f" of {end_of[stalled]} for {self._config.stall_timeout_s:g} s"
            )
        self._verified_s = time.monotonic()
