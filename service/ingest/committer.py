"""Commits what is complete, and takes "someone else owns it now" for an answer."""

import asyncio

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError, OffsetMetadataTooLargeError

from service.ingest.assignments import AssignedPartition, Assignments
from service.ingest.delivery import TopicPartition

log = structlog.get_logger()


class Committer:
    def __init__(self, assignments: Assignments, timeout_s: float) -> None:
        self._assignments = assignments
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        """A revocation waits for the commit under way: none may reach the broker in a later generation."""
        self._with_map = True
        self.commits = 0
        self.failures = 0

    async def commit(self, consumer: AIOKafkaConsumer) -> bool:
        """Commits every assigned partition whose value changed; False: something stays uncommitted. Never
        raises."""
        async with self._lock:
            due = self._due(consumer)
            if not due:
                return True
            try:
                await self._send(consumer, due)
            except OffsetMetadataTooLargeError:
                # The broker's offset.metadata.max.bytes is below the default: go on without maps.
                log.warning("kafka_commit_map_refused", broker_setting="offset.metadata.max.bytes")
                self._with_map = False
            except (CommitFailedError, IllegalStateError) as error:
                log.info("kafka_commit_superseded", error=type(error).__name__, partitions=len(due))
            except (KafkaError, TimeoutError, OSError) as error:
                log.warning("kafka_commit_failed", error=repr(error), partitions=len(due))
            else:
                self.commits += 1
                return True
            self.failures += 1
            return False

    def _due(
        self, consumer: AIOKafkaConsumer
    ) -> dict[TopicPartition, tuple[AssignedPartition, tuple[int, str]]]:
        if self._assignments.suspended:
            return {}
        ours = consumer.assignment()
        due = {}
        for partition, assigned, offsets in self._assignments.active():
            offset, completed = offsets.committable()
            value = (offset, completed if self._with_map else "")
            if value != assigned.committed and KafkaPartition(*partition) in ours:
                due[partition] = (assigned, value)
        return due

    async def _send(
        self,
        consumer: AIOKafkaConsumer,
        due: dict[TopicPartition, tuple[AssignedPartition, tuple[int, str]]],
    ) -> None:
        values = {KafkaPartition(*partition): value for partition, (_, value) in due.items()}
        # aiokafka retries a commit for as long as the broker is away; the next round has better values
        # anyway.
        async with asyncio.timeout(self._timeout_s):
            await consumer.commit(values)
        for assigned, value in due.values():
            assigned.committed = value
