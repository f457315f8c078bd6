"""What happens at a rebalance, inside aiokafka's callbacks: short, because a member does not heartbeat
meanwhile."""

from collections.abc import Collection

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import TopicPartition as KafkaPartition

from service.ingest.assignments import Assignments
from service.ingest.callbacks import Callbacks
from service.ingest.committer import Committer
from service.ingest.connection import generation_of

log = structlog.get_logger()


class Membership(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types
    def __init__(self, assignments: Assignments, committer: Committer, callbacks: Callbacks) -> None:
        self._assignments = assignments
        self._committer = committer
        self._callbacks = callbacks
        self.consumer: AIOKafkaConsumer | None = None
        self.lost = 0
        self.assignments_seen = 0

    async def on_partitions_revoked(self, revoked: Collection[KafkaPartition]) -> None:
        """The last moment to commit as the owner; the new owner starts from what is committed now."""
        if self.consumer is not None and revoked:
            await self._committer.commit(self.consumer)
        self._assignments.suspended = True

    async def on_partitions_assigned(self, assigned: Collection[KafkaPartition]) -> None:
        """Sorts kept from lost and pauses everything; the poll loop restores and resumes."""
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
        self.lost += len(lost)
        self.assignments_seen += 1
        log.info(
            "kafka_assigned",
            partitions=len(assigned),
            kept=sum(1 for _ in self._assignments.active()),
            lost=len(lost),
            assignment_epoch=self._assignments.epoch,
        )
        if lost:
            self._callbacks.lose(lost)
