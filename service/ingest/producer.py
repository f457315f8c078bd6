"""Results and dead letters out to Kafka: acknowledged by all replicas, or sent again."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from service.errors import DependencyError, JobError
from service.ingest.config import KafkaConfig

log = structlog.get_logger()

DISPOSE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
BACKOFF_S = 0.2


class ResultProducer:
    """An idempotent producer under supervision; used from one event loop.

    aiokafka can end up with a producer in which every send fails (#1133) or none is ever acknowledged. It is
    then replaced and the records are sent again: at least once, which the keyed results topic makes once.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.max_in_flight_sends)
        self._stopped = asyncio.Event()
        self._producer: AIOKafkaProducer | None = None
        self._available = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._acknowledged_s = 0.0
        self.in_flight = 0
        self.rebuilds = 0

    @property
    def ready(self) -> bool:
        return self._available.is_set()

    async def start(self) -> None:
        """Begins to connect and returns at once; sends wait until the broker is there."""
        assert self._supervisor is None, "start() was called before"
        self._supervisor = asyncio.create_task(self._supervise(), name="kafka-producer")

    async def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> None:
        """Returns when the record is acknowledged by all in-sync replicas.

        Waits for a free slot first: at most `max_in_flight_sends` are under way. Raises JobError for a record
        that is larger than the producer or the topic takes, DependencyError when stop() ends the wait.
        """
        async with self._slots:
            self.in_flight += 1
            self._idle.clear()
            try:
                await self._send_until_acknowledged(topic, key, value, headers)
            finally:
                self.in_flight -= 1
                if self.in_flight == 0:
                    self._idle.set()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Waits for sends under way, then ends; whatever is not acknowledged by then raises in its send()."""
        if not await _wait_for(self._idle, timeout_s):
            log.warning("kafka_sends_given_up", in_flight=self.in_flight, timeout_s=timeout_s)
        self._stopped.set()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    async def _send_until_acknowledged(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        while True:
            await self._unless_stopped(self._available.wait())
            producer = self._producer
            if producer is None:
                continue
            try:
                await self._unless_stopped(self._send_once(producer, topic, key, value, headers))
                return
            except MessageSizeTooLargeError as error:
                size = len(key or b"") + len(value or b"")
                limit = self._config.max_message_bytes
                raise JobError(
                    "record_too_large",
                    f"a record for {topic} has {size} bytes; the limit is {limit}, or what the topic sets",
                    field="value",
                    value=size,
                    limit=limit,
                ) from error
            except (UnknownTopicOrPartitionError, TopicAuthorizationFailedError) as error:
                log.warning("kafka_send_refused", topic=topic, error=repr(error), action="retrying")
            except TimeoutError as error:
                # A topic without metadata times out as well; while others are acknowledged the producer is
                # sound.
                if time.monotonic() - self._acknowledged_s > self._config.ack_timeout_s:
                    self._replace(producer, error)
            except (KafkaError, OSError) as error:
                self._replace(producer, error)
            await _wait_for(self._stopped, BACKOFF_S)

    async def _send_once(
        self,
        producer: AIOKafkaProducer,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]],
    ) -> None:
        async with asyncio.timeout(self._config.ack_timeout_s):
            acknowledged = await producer.send(topic, value=value, key=key, headers=list(headers))
            await asyncio.shield(acknowledged)
        self._acknowledged_s = time.monotonic()

    def _replace(self, producer: AIOKafkaProducer, error: BaseException) -> None:
        """Asks for a new producer, once for all the sends that failed with the old one."""
        if self._producer is producer and not self._stopped.is_set():
            log.warning(
                "kafka_producer_broken", error=repr(error), action="rebuilding", in_flight=self.in_flight
            )
            self.rebuilds += 1
            self._producer = None
            self._available.clear()
            self._broken.set()

    async def _supervise(self) -> None:
        """Keeps one working producer: connects, waits until it breaks, disposes of it, and again."""
        backoff_s = BACKOFF_S
        while True:
            producer = self._make_producer()
            try:
                await self._connect(producer)
                backoff_s = BACKOFF_S
                self._acknowledged_s = time.monotonic()
                self._broken.clear()
                self._producer = producer
                self._available.set()
                await self._broken.wait()
            except (KafkaError, TimeoutError, OSError) as error:
                log.warning(
                    "kafka_unavailable", bootstrap=self._config.bootstrap, error=str(error), action="retrying"
                )
            finally:
                self._producer = None
                self._available.clear()
                await _dispose(producer)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._config.retry_backoff_max_s)

    def _make_producer(self) -> AIOKafkaProducer:
        compression = None if self._config.compression == "none" else self._config.compression
        return AIOKafkaProducer(
            acks="all",
            enable_idempotence=True,
            compression_type=compression,
            max_request_size=self._config.max_message_bytes,
            **self._config.client_options(),
        )

    async def _connect(self, producer: AIOKafkaProducer) -> None:
        # start() asks for a producer id again and again, without an end of its own. Not cut short on a slow machine:
        # aiokafka loses sight of the connection that it bootstraps over when that is cancelled.
        async with asyncio.timeout(max(CONNECT_TIMEOUT_S, self._config.ack_timeout_s)):
            await producer.start()

    async def _unless_stopped(self, awaitable: Any) -> None:
        task = asyncio.ensure_future(awaitable)
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise DependencyError("the producer was stopped before Kafka acknowledged the record")
            task.result()
        finally:
            stopped.cancel()
            task.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)


async def _dispose(producer: AIOKafkaProducer) -> None:
    """Ends a producer in bounded time; stop() alone waits for ever for what cannot be delivered (#583)."""
    try:
        async with asyncio.timeout(DISPOSE_TIMEOUT_S):
            await producer.stop()
    except (TimeoutError, KafkaError, OSError) as error:
        log.warning("kafka_producer_abandoned", error=repr(error))
        producer._closed = True
        if producer._sender.sender_task is not None:
            producer._sender.sender_task.cancel()
        await producer.client.close()


async def _wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
