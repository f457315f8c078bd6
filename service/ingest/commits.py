"""Commits complete offsets for the group, and reads what a former owner has committed."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError, OffsetMetadataTooLargeError

from service.ingest.assignments import AssignedPartition, Assignments
from service.ingest.delivery import TopicPartition
from service.ingest.kafka_clients import admin_client
from service.ingest.kafka_config import KafkaConfig
from service.ingest.offsets import Ranges, decode_completed

log = structlog.get_logger()


class Committer:
    """Commits on behalf of one group member. A commit that the broker refuses because the partition has another owner
    is no failure of ours."""

    def __init__(self, assignments: Assignments, timeout_s: float) -> None:
        self._assignments = assignments
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        """A revocation waits for the commit in flight: none may reach the broker in a later generation."""
        self._with_map = True
        self.num_commits = 0
        self.num_failures = 0

    async def commit(self, consumer: AIOKafkaConsumer) -> bool:
        """Commits every assigned partition whose value changed; False: something stays uncommitted. Never raises."""
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
                self.num_commits += 1
                return True
            self.num_failures += 1
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
        # aiokafka retries a commit for as long as the broker is away; the next round has better values anyway.
        async with asyncio.timeout(self._timeout_s):
            await consumer.commit(values)
        for assigned, value in due.values():
            assigned.committed = value


@dataclass(frozen=True, slots=True)
class Committed:
    """The group's commit for one partition; `offset` is None if there is none."""

    offset: int | None
    metadata: str = ""

    @property
    def completed(self) -> Ranges:
        """Offsets complete beyond the committed one; none where the metadata is not ours."""
        return (decode_completed(self.offset, self.metadata) or ()) if self.offset is not None else ()

    @property
    def value(self) -> tuple[int, str] | None:
        return None if self.offset is None else (self.offset, self.metadata)


async def fetch_committed(
    config: KafkaConfig, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, Committed]:
    """Reads commits with their metadata, which AIOKafkaConsumer.committed() drops.

    Raises KafkaError or OSError unless the broker answered for every partition: aiokafka's admin client does not look
    at the response's own error, and a missing answer must not be taken for "nothing committed".
    """
    keys = {partition: KafkaPartition(*partition) for partition in partitions}
    try:
        async with admin_client(config) as admin:
            answer = await admin.list_consumer_group_offsets(config.group_id, partitions=list(keys.values()))
    except AttributeError as error:
        # aiokafka names the wrong field when it reports an error of a single partition.
        raise KafkaError(f"committed offsets of group {config.group_id} could not be read") from error
    missing = [partition for partition, key in keys.items() if key not in answer]
    if missing:
        raise KafkaError(f"the coordinator of group {config.group_id} has no answer for {missing} yet")
    found = {partition: answer[key] for partition, key in keys.items()}
    return {
        partition: Committed(commit.offset, commit.metadata) if commit.offset >= 0 else Committed(None)
        for partition, commit in found.items()
    }
