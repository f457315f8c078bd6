"""Builds, closes and abandons aiokafka's clients. The only module that makes them or uses their private parts."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Literal

import aiokafka.client
import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import AIOKafkaConnection
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError

from service.ingest.delivery import TopicPartition
from service.ingest.fetch_throttle import FetchThrottle
from service.ingest.kafka_config import KafkaConfig

log = structlog.get_logger()

CLOSE_TIMEOUT_S = 5.0
NO_PARTITION = KafkaPartition("tailrace-no-such-topic", 0)
"""Polling only this keeps the membership alive, takes no record and leaves prefetched records in their buffer."""

_CONSUMER_TASKS = ("_coordination_task", "_heartbeat_task", "_commit_refresh_task", "_reset_committed_task")
"""Background tasks of aiokafka's two kinds of coordinator, with a group and without."""

_opened: ContextVar["weakref.WeakSet[AIOKafkaConnection] | None"] = ContextVar("opened", default=None)
"""Connections of the client that is being started in this context."""
_create_conn = aiokafka.client.create_conn


async def _create_noted_conn(*args: Any, **kwargs: Any) -> AIOKafkaConnection:
    connection = await _create_conn(*args, **kwargs)
    if (opened := _opened.get()) is not None:
        opened.add(connection)
    return connection


aiokafka.client.create_conn = _create_noted_conn


async def start_client(client: AIOKafkaConsumer | AIOKafkaProducer | AIOKafkaAdminClient) -> None:
    """Starts one of aiokafka's clients; close it afterwards in any case. Raises KafkaError or OSError.

    If it fails or is cancelled, all its connections are closed. aiokafka itself loses the one that it bootstraps over
    when it is cancelled there.
    """
    opened: weakref.WeakSet[AIOKafkaConnection] = weakref.WeakSet()
    token = _opened.set(opened)
    try:
        await client.start()
    except BaseException:
        for connection in list(opened):
            connection.close()
        raise
    finally:
        _opened.reset(token)


def make_producer(config: KafkaConfig, *, linger_ms: int = 0) -> AIOKafkaProducer:
    """Returns an idempotent producer, not started, that waits for all in-sync replicas.

    It retries within aiokafka's own limits; `ResultProducer` replaces one that is broken.
    """
    return AIOKafkaProducer(
        acks="all",
        enable_idempotence=True,
        compression_type=None if config.compression == "none" else config.compression,
        linger_ms=linger_ms,
        max_request_size=config.max_message_bytes,
        **_common_options(config),
    )


def make_group_consumer(
    config: KafkaConfig, assignor: type[Any], listener: ConsumerRebalanceListener
) -> AIOKafkaConsumer:
    """Returns a member of the workers' group, subscribed to the jobs topic and not started."""
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
        **_common_options(config),
    )
    consumer.subscribe([config.jobs_topic], listener=listener)
    FetchThrottle.install(consumer)
    return consumer


def make_topic_reader(
    config: KafkaConfig, topic: str, *, start: Literal["earliest", "latest"]
) -> AIOKafkaConsumer:
    """Returns a consumer of all partitions of one topic, outside any group and not started."""
    consumer = AIOKafkaConsumer(
        topic, group_id=None, auto_offset_reset=start, enable_auto_commit=False, **_common_options(config)
    )
    FetchThrottle.install(consumer)
    return consumer


@asynccontextmanager
async def admin_client(config: KafkaConfig) -> AsyncIterator[AIOKafkaAdminClient]:
    """Yields a started admin client and closes it. Raises KafkaError or OSError when no broker answers."""
    admin = AIOKafkaAdminClient(**_common_options(config))
    try:
        await start_client(admin)
        yield admin
    finally:
        await admin.close()


def _common_options(config: KafkaConfig) -> dict[str, Any]:
    """Returns the arguments that aiokafka's consumer, producer and admin client have in common."""
    password = config.kafka_sasl_password
    return {
        "bootstrap_servers": config.kafka_bootstrap,
        "client_id": config.client_id,
        "metadata_max_age_ms": round(config.metadata_max_age_s * 1000),
        "request_timeout_ms": round(config.request_timeout_s * 1000),
        "security_protocol": config.kafka_security_protocol,
        "ssl_context": config.ssl_context,
        "sasl_mechanism": config.kafka_sasl_mechanism,
        "sasl_plain_username": config.kafka_sasl_username,
        "sasl_plain_password": password.get_secret_value() if password else None,
    }


def new_assignor() -> type[Any]:
    """Returns a sticky assignor class for one consumer: aiokafka keeps the previous assignment on the class, where all
    consumers would share it.

    A consumer gets exactly one: with two, aiokafka 0.14 sends JoinGroup once for each.
    """
    return type("StickyAssignor", (StickyPartitionAssignor,), {})


def repair_header_names(consumer: AIOKafkaConsumer, partitions: Iterable[TopicPartition]) -> None:
    """Makes records of these partitions readable from the next fetch on (see `FetchThrottle.unreadable`)."""
    throttle = consumer._client.send
    assert isinstance(throttle, FetchThrottle)
    throttle.unreadable.update(partitions)


def generation_of(consumer: AIOKafkaConsumer) -> int:
    """Returns the group generation that this consumer is in; aiokafka has no public way to learn it."""
    generation: int = consumer._coordinator.generation
    return generation


async def close_consumer(consumer: AIOKafkaConsumer, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Stops the consumer, which leaves its group; abandons it after `timeout_s`, as in a rebalance storm."""
    try:
        async with asyncio.timeout(timeout_s):
            await consumer.stop()
    except (TimeoutError, KafkaError, OSError) as error:
        log.warning("kafka_leave_failed", error=repr(error), timeout_s=timeout_s)
        await abandon_consumer(consumer)


async def abandon_consumer(consumer: AIOKafkaConsumer) -> None:
    """Ends a consumer without telling the broker: none of its tasks may keep heartbeating for a member that is gone."""
    consumer._closed = True
    consumer._client._get_conn = _no_connection
    fetcher, coordinator = consumer._fetcher, consumer._coordinator
    tasks: list[asyncio.Task[Any] | None] = [getattr(coordinator, name, None) for name in _CONSUMER_TASKS]
    if fetcher is not None:
        fetcher._closed = True
        tasks += [fetcher._fetch_task, *fetcher._pending_tasks]
    alive = [task for task in tasks if task is not None]
    for task in alive:
        task.cancel()
    await asyncio.gather(*alive, return_exceptions=True)
    await consumer._client.close()


async def _no_connection(*_: Any, **__: Any) -> None:
    """Takes the place of `_get_conn` in an abandoned client: a request that is being made would connect anew."""


async def close_producer(producer: AIOKafkaProducer, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Sends what is buffered and stops the producer; abandons it after `timeout_s`, because stop() alone waits
    forever for records that cannot be delivered (#583)."""
    try:
        async with asyncio.timeout(timeout_s):
            await producer.stop()
    except (TimeoutError, KafkaError, OSError) as error:
        log.warning("kafka_producer_abandoned", error=repr(error))
        await abandon_producer(producer)


async def abandon_producer(producer: AIOKafkaProducer) -> None:
    """Ends a producer at once; drops what it has not sent, without telling the senders that wait for it."""
    client, sender = producer.client, producer._sender.sender_task
    producer._closed = True
    client._get_conn = _no_connection
    if sender is not None:
        sender.cancel()
    await client.close()
    if sender is not None:
        # It waits for its requests, which have ended with their connections, or end with the ones being made.
        await asyncio.wait({sender}, timeout=CLOSE_TIMEOUT_S)
        await client.close()
