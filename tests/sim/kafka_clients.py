"""Take the place of aiokafka's producer and admin client, as far as the product uses them. See kafka_consumer too."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka.errors import (
    KafkaConnectionError,
    KafkaTimeoutError,
    ProducerClosed,
    RequestTimedOutError,
)
from aiokafka.structs import TopicPartition

from tests.sim.broker import Broker, Partition, Unsent
from tests.sim.group import Group
from tests.sim.loop import OWNER
from tests.sim.network import Network, Serve, Wire

KAFKA = "kafka"
RETRY_BACKOFF_S = 0.1


@dataclass(slots=True)
class Cluster:
    """What all clients of one schedule talk to."""

    network: Network
    broker: Broker
    group: Group


class BrokerConnection:
    """One client's connection to the broker, made anew after a failure, as aiokafka does."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._network = cluster.network
        self._owner = OWNER.get()
        self._timeout_s = timeout_s
        self._wire: Wire | None = None
        self._closed = False

    async def call(self, serve: Serve) -> Any:
        """Returns the broker's answer. Raises KafkaError: what the broker answered, or a lost connection, or no answer
        in time."""
        if self._closed:
            raise KafkaConnectionError("the client is closed")
        if self._wire is None or self._wire.closed:
            self._wire = self._network.wire(self._owner, KAFKA)
        wire = self._wire
        try:
            async with asyncio.timeout(self._timeout_s):
                return await wire.call(serve)
        except TimeoutError:
            wire.close()
            raise RequestTimedOutError from None
        except ConnectionError as error:
            raise KafkaConnectionError(str(error)) from error

    def close(self) -> None:
        self._closed = True
        if self._wire is not None:
            self._wire.close()


class SimClient:
    """What `abandon_producer` and `abandon_consumer` reach into."""

    def __init__(self, *connections: BrokerConnection) -> None:
        self._connections = connections
        self._get_conn: Any = None

    async def send(self, node_id: Any, request: Any, **options: Any) -> Any:
        raise NotImplementedError("the simulated consumer fetches by itself")

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()


@dataclass(slots=True)
class SimSender:
    sender_task: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class _Queued:
    partition: Partition
    record: Unsent
    future: "asyncio.Future[None]"
    expires_s: float


class SimProducer:
    """Idempotent, one batch in flight: it is sent again, with the same sequence numbers, until it is acknowledged."""

    cluster: Cluster

    def __init__(self, *, request_timeout_ms: int, **options: Any) -> None:
        assert options["acks"] == "all"
        assert options["enable_idempotence"]
        self._timeout_s = request_timeout_ms / 1000
        self._connection = BrokerConnection(self.cluster, self._timeout_s)
        self.client = SimClient(self._connection)
        self._sender = SimSender()
        self._closed = False
        self._id = 0
        self._next_seq: dict[Partition, int] = {}
        self._queue: list[_Queued] = []
        self._queued = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    async def start(self) -> None:
        broker = self.cluster.broker
        while True:
            try:
                self._id = await self._connection.call(lambda respond: respond(broker.new_producer()))
                break
            except KafkaConnectionError:
                if not self._next_seq and self._connection._closed:
                    raise
                await asyncio.sleep(RETRY_BACKOFF_S)
            except RequestTimedOutError:
                pass
        self._sender.sender_task = asyncio.get_running_loop().create_task(self._run())

    async def send(
        self,
        topic: str,
        *,
        value: bytes | None,
        key: bytes | None,
        headers: Sequence[tuple[str, bytes]],
        timestamp_ms: int,
    ) -> "asyncio.Future[None]":
        if self._closed:
            raise ProducerClosed
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        partition = self.cluster.broker.partition_of(topic, key)
        record = Unsent(key, value, tuple(headers))
        self._queue.append(_Queued(partition, record, future, loop.time() + self._timeout_s))
        self._empty.clear()
        self._queued.set()
        return future

    async def stop(self) -> None:
        """Sends what is queued, however long that takes."""
        self._closed = True
        if self._sender.sender_task is not None:
            await self._empty.wait()
            self._sender.sender_task.cancel()
        await self.client.close()

    async def _run(self) -> None:
        while True:
            while not self._queue:
                self._empty.set()
                self._queued.clear()
                await self._queued.wait()
            await asyncio.sleep(0)  # what is sent in the same turn shares the batch
            partition = self._queue[0].partition
            batch = [queued for queued in self._queue if queued.partition == partition]
            self._queue = [queued for queued in self._queue if queued.partition != partition]
            await self._send_batch(partition, batch)

    async def _send_batch(self, partition: Partition, batch: list[_Queued]) -> None:
        broker, clock = self.cluster.broker, asyncio.get_running_loop().time
        producer, first_seq = self._id, self._next_seq.get(partition, 0)
        self._next_seq[partition] = first_seq + len(batch)
        records = [queued.record for queued in batch]
        failure: Exception | None = None
        while True:
            try:
                await self._connection.call(
                    lambda respond: respond(broker.produce(producer, partition, first_seq, records))
                )
                break
            except (KafkaConnectionError, RequestTimedOutError):
                if clock() >= batch[0].expires_s:
                    failure = KafkaTimeoutError("the batch expired")
                    break
                await asyncio.sleep(RETRY_BACKOFF_S)
            except Exception as error:
                failure = error
                break
        for queued in batch:
            if not queued.future.done():
                if failure is None:
                    queued.future.set_result(None)
                else:
                    queued.future.set_exception(failure)


@dataclass(frozen=True, slots=True)
class SimCommitted:
    offset: int
    metadata: str


class SimAdmin:
    cluster: Cluster

    def __init__(self, *, request_timeout_ms: int, **options: Any) -> None:
        self._connection = BrokerConnection(self.cluster, request_timeout_ms / 1000)

    async def start(self) -> None:
        await self._connection.call(lambda respond: respond(None))

    async def close(self) -> None:
        self._connection.close()

    async def list_topics(self) -> list[str]:
        broker = self.cluster.broker
        topics: list[str] = await self._connection.call(lambda respond: respond(sorted(broker.topics)))
        return topics

    async def describe_cluster(self) -> dict[str, str]:
        answer: dict[str, str] = await self._connection.call(lambda respond: respond({"cluster_id": "sim"}))
        return answer

    async def list_consumer_group_offsets(
        self, group_id: str, *, partitions: list[TopicPartition]
    ) -> dict[TopicPartition, SimCommitted]:
        commits = self.cluster.broker.commits

        def serve(respond: Any) -> None:
            respond(
                {key: SimCommitted(*commits.get((key.topic, key.partition), (-1, ""))) for key in partitions}
            )

        answer: dict[TopicPartition, SimCommitted] = await self._connection.call(serve)
        return answer
