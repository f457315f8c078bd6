"""Clients without optional codecs can read every record that the service writes."""

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import UnsupportedCodecError

from service.client import Client
from service.ingest import KafkaConfig
from service.ingest.kafka_config import Compression
from tests.support.kafka import KafkaBroker
from tests.support.members import config_for, running_producer
from tests.support.redis import RedisServer

pytestmark = pytest.mark.kafka

VALUE = b"compressible " * 200


@pytest.fixture
def plain_aiokafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip install aiokafka` leaves it: no lz4, snappy or zstd."""
    for codec in ("lz4", "snappy", "zstd"):
        monkeypatch.setattr(f"aiokafka.codec.has_{codec}", lambda: False)


async def read_one(kafka: KafkaBroker, topic: str) -> bytes:
    async with AIOKafkaConsumer(
        topic, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest"
    ) as consumer:
        value: bytes = (await consumer.getone()).value
        return value


async def write_one(config: KafkaConfig) -> None:
    producer = running_producer(config)
    await producer.send(config.jobs_topic, b"key", VALUE)
    await producer.stop()


async def test_results_are_uncompressed_by_default(kafka: KafkaBroker, plain_aiokafka: None) -> None:
    config = config_for(kafka, await kafka.new_topic())
    await write_one(config)
    assert await read_one(kafka, config.jobs_topic) == VALUE


async def test_gzip_is_read_by_every_client(kafka: KafkaBroker, plain_aiokafka: None) -> None:
    config = config_for(kafka, await kafka.new_topic(), compression="gzip")
    await write_one(config)
    assert await read_one(kafka, config.jobs_topic) == VALUE


@pytest.mark.parametrize("codec", ["lz4", "snappy", "zstd"])
async def test_control_the_other_codecs_fail_a_plain_client(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch, codec: Compression
) -> None:
    config = config_for(kafka, await kafka.new_topic(), compression=codec)
    await write_one(config)
    monkeypatch.setattr(f"aiokafka.codec.has_{codec}", lambda: False)
    with pytest.raises(UnsupportedCodecError):
        await read_one(kafka, config.jobs_topic)


@pytest.mark.redis
async def test_jobs_of_the_client_are_uncompressed(
    kafka: KafkaBroker, redis_server: RedisServer, plain_aiokafka: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await kafka.new_topic()
    monkeypatch.setenv("TAILRACE_JOBS_TOPIC", topic)
    redis_url = f"redis://127.0.0.1:{redis_server.port}/0"
    async with Client(bootstrap=kafka.bootstrap, redis_url=redis_url, namespace="codec") as client:
        await client.publish("job", VALUE)
        assert client.stats().num_published == 1
    assert await read_one(kafka, topic) == VALUE
