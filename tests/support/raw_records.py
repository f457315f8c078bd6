"""Records as other clients of Kafka can write them, and aiokafka's producer cannot."""

from collections.abc import Sequence
from dataclasses import dataclass

from aiokafka import AIOKafkaProducer
from aiokafka.errors import for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy as BatchBuilder


class RawName(str):
    """A header name of any bytes."""

    raw: bytes

    def __new__(cls, raw: bytes) -> "RawName":
        name = super().__new__(cls, raw.decode(errors="replace"))
        name.raw = raw
        return name

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return self.raw


@dataclass(frozen=True, slots=True)
class RawRecord:
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()
    timestamp_ms: int = -1


async def publish_batch(
    bootstrap: str, topic: str, partition: int, records: Sequence[RawRecord], *, compression: int = 0
) -> None:
    """All records in one batch, acknowledged when it returns; `compression` is Kafka's number of the codec."""
    builder = BatchBuilder(2, compression, 0, -1, -1, -1, 64 << 20)
    for index, record in enumerate(records):
        headers = [(RawName(name), value) for name, value in record.headers]
        builder.append(index, record.timestamp_ms, record.key, record.value, headers)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        await producer.client._wait_on_metadata(topic)
        leader = producer.client.cluster.leader_for_partition(_partition(topic, partition))
        request = ProduceRequest(None, -1, 30_000, [(topic, [(partition, bytes(builder.build()))])])
        response = await producer.client.send(leader, request)
    for _, partitions in response.topics:
        for _, code, *_ in partitions:
            assert code == 0, for_code(code).__name__


def _partition(topic: str, partition: int) -> object:
    from aiokafka import TopicPartition

    return TopicPartition(topic, partition)
