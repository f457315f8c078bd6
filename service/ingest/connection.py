"""The life of one AIOKafkaConsumer: made, joined, left or abandoned. The only module that knows its
insides."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError

from service.ingest.config import KafkaConfig
from service.ingest.delivery import TopicPartition
from service.ingest.fetch_throttle import FetchThrottle
from service.ingest.metadata import Ranges, decode_completed

log = structlog.get_logger()

NOTHING = KafkaPartition("tailrace-no-such-topic", 0)
"""Polling only this keeps the membership alive, takes no record and leaves prefetched ones in their
buffer."""


def new_assignor() -> type[Any]:
    """A sticky assignor of its own: aiokafka keeps the previous assignment on the class, shared by all
    consumers.

    Exactly one goes to a consumer: with two, aiokafka 0.14 sends JoinGroup once for each.
    """
    return type("StickyAssignor", (StickyPartitionAssignor,), {})


def make_consumer(
    config: KafkaConfig, assignor: type[Any], listener: ConsumerRebalanceListener
) -> AIOKafkaConsumer:
    consumer = AIOKafkaConsumer(
        group_id=config.group_id,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        session_timeout_ms=round(config.session_timeout_s * 1000),
        heartbeat_interval_ms=round(config.heartbeat_interval_s * 1000),
        rebalance_timeout_ms=round(config.rebalance_timeout_s * 1000),
        max_poll_interval_ms=round(config.max_poll_interval_s * 1000),
        fetch_max_bytes=config.fetch_max_bytes,
        max_partition_fetch_bytes=config.max_partition_fetch_bytes,
        partition_assignment_strategy=(assignor,),
        **config.client_options(),
    )
    consumer.subscribe([config.jobs_topic], listener=listener)
    FetchThrottle.install(consumer)
    return consumer


def repair_header_names(consumer: AIOKafkaConsumer, partitions: Iterable[TopicPartition]) -> None:
    """From the next fetch on, make records of these partitions readable (see `FetchThrottle.unreadable`)."""
    throttle = consumer._client.send
    assert isinstance(throttle, FetchThrottle)
    throttle.unreadable.update(partitions)


def generation_of(consumer: AIOKafkaConsumer) -> int:
    """The group generation this consumer is in; there is no public way to learn it."""
    generation: int = consumer._coordinator.generation
    return generation


async def leave(consumer: AIOKafkaConsumer, timeout_s: float) -> None:
    """Stops the consumer and leaves the group; abandons it when that takes too long, as in a rebalance
    storm."""
    try:
        async with asyncio.timeout(timeout_s):
            await consumer.stop()
    except (TimeoutError, KafkaError, OSError) as error:
        log.warning("kafka_leave_failed", error=repr(error), timeout_s=timeout_s)
        await abandon(consumer)


async def abandon(consumer: AIOKafkaConsumer) -> None:
    """Ends a consumer without a word to the broker: nothing of it may go on heartbeating for a member that is
    gone."""
    consumer._closed = True
    fetcher, coordinator = consumer._fetcher, consumer._coordinator
    tasks: list[asyncio.Task[Any] | None] = []
    if coordinator is not None:
        tasks += [
            coordinator._coordination_task,
            coordinator._heartbeat_task,
            coordinator._commit_refresh_task,
        ]
    if fetcher is not None:
        fetcher._closed = True
        tasks += [fetcher._fetch_task, *fetcher._pending_tasks]
    alive = [task for task in tasks if task is not None]
    for task in alive:
        task.cancel()
    await asyncio.gather(*alive, return_exceptions=True)
    await consumer._client.close()


@dataclass(frozen=True, slots=True)
class Committed:
    """What the group has committed for one partition."""

    offset: int | None
    metadata: str = ""

    @property
    def completed(self) -> Ranges:
        """Offsets complete beyond the committed one; nothing where the metadata is not ours."""
        return (decode_completed(self.offset, self.metadata) or ()) if self.offset is not None else ()

    @property
    def value(self) -> tuple[int, str] | None:
        return None if self.offset is None else (self.offset, self.metadata)


async def fetch_committed(
    config: KafkaConfig, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, Committed]:
    """Reads commits with their metadata, which AIOKafkaConsumer.committed() drops.

    Raises KafkaError unless the broker answered for every partition: aiokafka's admin client does not look at
    the response's own error, and an answer that is missing must not be taken for "nothing committed".
    """
    admin = AIOKafkaAdminClient(**config.client_options())
    try:
        await admin.start()
        answer = await admin.list_consumer_group_offsets(
            config.group_id, partitions=[KafkaPartition(*partition) for partition in partitions]
        )
    except AttributeError as error:
        # It names the wrong field when it reports an error of a single partition.
        raise KafkaError(f"committed offsets of group {config.group_id} could not be read") from error
    finally:
        await admin.close()
    missing = [partition for partition in partitions if KafkaPartition(*partition) not in answer]
    if missing:
        raise KafkaError(f"the coordinator of group {config.group_id} has no answer for {missing} yet")
    found = {partition: answer[KafkaPartition(*partition)] for partition in partitions}
    return {
        partition: Committed(commit.offset, commit.metadata) if commit.offset >= 0 else Committed(None)
        for partition, commit in found.items()
    }
