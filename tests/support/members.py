"""Members of a consumer group for tests on a real broker: short timeouts, everything recorded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer, ConsumerRebalanceListener

from service.ingest import Delivery, JobConsumer, KafkaConfig, ResultProducer, TopicPartition
from tests.support.configs import kafka_config
from tests.support.kafka import KafkaBroker

LIMIT_S = 20.0


async def eventually(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Waits for a condition that nothing announces; fails when it does not come true."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(0.01)


def config_for(kafka: KafkaBroker, topic: str, group: str | None = None, **changes: Any) -> KafkaConfig:
    fast: dict[str, Any] = {
        "metadata_max_age_s": 1.0,
        "session_timeout_s": 3.0,
        "heartbeat_interval_s": 0.2,
        "rebalance_timeout_s": 4.0,
        "poll_timeout_s": 0.05,
        "commit_interval_s": 0.05,
        "check_interval_s": 0.2,
        "stall_timeout_s": 1.0,
        "retry_backoff_max_s": 0.5,
        "ack_timeout_s": 2.0,
        "create_topics": False,
        "resume_credit": 8,
    }
    names = {
        "kafka_bootstrap": kafka.bootstrap,
        "jobs_topic": topic,
        "group_id": group or kafka.unique("group"),
    }
    return kafka_config(**(names | fast | changes))


class IgnoresRebalances(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types
    async def on_partitions_revoked(self, revoked: Any) -> None: ...

    async def on_partitions_assigned(self, assigned: Any) -> None: ...


class Member:
    """A JobConsumer that keeps what it gets; `capacity` is its credit when nothing is in flight."""

    def __init__(self, config: KafkaConfig, capacity: int = 1_000) -> None:
        self.capacity = capacity
        self.deliveries: list[Delivery] = []
        self.in_flight: dict[TopicPartition, dict[int, Delivery]] = {}
        self.lost: list[TopicPartition] = []
        self.most_in_flight = 0
        self.on_delivery: Callable[[Delivery], None] = lambda _: None
        self.consumer = JobConsumer(
            config,
            on_deliveries=self._deliver,
            on_lost=self._lose,
            credit=lambda: self.capacity - self.num_in_flight,
        )
        self.task = asyncio.create_task(self.consumer.run())

    @property
    def num_in_flight(self) -> int:
        return sum(len(records) for records in self.in_flight.values())

    @property
    def kafka(self) -> Any:
        """The AIOKafkaConsumer of now, for tests that look at or break its insides."""
        return self.consumer._member.consumer

    def values(self) -> list[bytes]:
        return [delivery.value or b"" for delivery in self.deliveries]

    def complete(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in list(deliveries):
            self.in_flight.get((delivery.topic, delivery.partition), {}).pop(delivery.offset, None)
            self.consumer.complete(delivery)

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            records = self.in_flight.setdefault((delivery.topic, delivery.partition), {})
            assert delivery.offset not in records, (
                f"offset {delivery.offset} was delivered twice while in flight"
            )
            records[delivery.offset] = delivery
        self.deliveries += deliveries
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        for delivery in deliveries:
            self.on_delivery(delivery)

    def _lose(self, partitions: Sequence[TopicPartition]) -> None:
        self.lost += partitions
        for partition in partitions:
            self.in_flight.pop(partition, None)

    async def joined(self) -> None:
        await eventually(lambda: self.consumer.ready, "the consumer is ready")

    async def received(self, count: int, limit_s: float = LIMIT_S) -> None:
        def enough() -> bool:
            if self.task.done():
                self.task.result()
            return len(self.deliveries) >= count

        await eventually(enough, f"{count} deliveries (got {len(self.deliveries)})", limit_s)

    async def close(self) -> None:
        await self.consumer.close()
        await self.task


async def polled(worker: Member, times: int) -> None:
    """The consumer has gone round its poll loop so often, and had its chance to do what it should not."""
    turn = worker.consumer._poller._num_polls
    await eventually(lambda: worker.consumer._poller._num_polls > turn + times, f"{times} polls")


@contextlib.asynccontextmanager
async def member(config: KafkaConfig, capacity: int = 1_000) -> AsyncIterator[Member]:
    one = Member(config, capacity)
    try:
        yield one
    finally:
        await one.close()


def running_producer(config: KafkaConfig, **options: Any) -> ResultProducer:
    """A producer whose `run` has begun; `stop` ends both."""
    producer = ResultProducer(config, **options)
    running = asyncio.create_task(producer.run())
    _running_producers.add(running)
    running.add_done_callback(_running_producers.discard)
    return producer


_running_producers: set["asyncio.Task[None]"] = set()
"""The event loop holds its tasks weakly."""


async def publish(kafka: KafkaBroker, topic: str, values: Iterable[bytes], **options: Any) -> None:
    """Sends in order; values go to `partition` if given, else spread by the default partitioner."""
    partition = options.pop("partition", None)
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, enable_idempotence=True, **options)
    await producer.start()
    try:
        for sent in [await producer.send(topic, value, partition=partition) for value in values]:
            await sent
    finally:
        await producer.stop()
