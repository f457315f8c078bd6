"""Keeps one working aiokafka producer: connects, waits until it breaks, disposes of it, and again."""

import asyncio
import time
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, KafkaError

from service.errors import DependencyError
from service.ingest.config import KafkaConfig

log = structlog.get_logger()

DISPOSE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
BACKOFF_S = 0.2


class ProducerSupervisor:
    """aiokafka can end up with a producer in which every send fails (#1133) or none is ever acknowledged: `replace`
    asks for another one. Used from one event loop."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._stopped = asyncio.Event()
        self._available = asyncio.Event()
        self._broken = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._producer: AIOKafkaProducer | None = None
        self._flush = True
        self._gone: asyncio.Future[None] | None = None
        """Resolves when the producer of now was replaced and will acknowledge nothing more."""
        self._acknowledged_s = 0.0
        self.num_replaced = 0

    @property
    def available(self) -> bool:
        return self._available.is_set()

    @property
    def silent_s(self) -> float:
        """Seconds since a record was last acknowledged, or since the connection was made."""
        return time.monotonic() - self._acknowledged_s

    async def run(self) -> None:
        """Until `stop()`; a broker that is away is waited for."""
        self._ended.clear()
        backoff_s = BACKOFF_S
        try:
            while not self._stopped.is_set():
                if await self._serve():
                    backoff_s = BACKOFF_S
                await self.pause(backoff_s)
                backoff_s = min(2 * backoff_s, self._config.retry_backoff_max_s)
        finally:
            self._stopped.set()
            self._ended.set()

    def end(self) -> None:
        """Make `run` return, and everything raise that waits for a producer."""
        self._stopped.set()
        self._broken.set()

    async def stop(self) -> None:
        """`end`, and wait for `run` in bounded time."""
        self.end()
        await wait_for(self._ended, 2 * DISPOSE_TIMEOUT_S)

    async def producer(self) -> AIOKafkaProducer:
        """The working producer, however long the broker is away. Raises DependencyError after `end()`."""
        while True:
            await self.unless_stopped(self._available.wait())
            if self._producer is not None:
                return self._producer

    async def send(self, producer: AIOKafkaProducer, topic: str, **record: Any) -> None:
        """Returns when all in-sync replicas have the record. Raises what aiokafka raises, TimeoutError without an
        acknowledgement, DependencyError after `end()`."""
        await self.unless_stopped(self._send(producer, topic, record))
        self._acknowledged_s = time.monotonic()

    def replace(self, producer: AIOKafkaProducer, error: BaseException, *, flush: bool = False) -> None:
        """Asks for a new producer, once for all the sends that failed with the old one.

        Without `flush` what the old one still holds is dropped, so that nothing of it arrives after it was sent anew,
        or withdrawn.
        """
        if self._producer is producer and not self._stopped.is_set():
            log.warning("kafka_producer_replaced", error=repr(error))
            self.num_replaced += 1
            self._producer = None
            self._flush = flush
            self._available.clear()
            self._broken.set()

    async def pause(self, seconds: float) -> None:
        """Ends early when the supervisor stops."""
        await wait_for(self._stopped, seconds)

    async def _serve(self) -> bool:
        """One producer from its making to its end. False: it never worked."""
        producer, connected = self._make_producer(), False
        try:
            await self._connect(producer)
            connected = True
            self._acknowledged_s = time.monotonic()
            self._broken.clear()
            self._gone = asyncio.get_running_loop().create_future()
            if not self._stopped.is_set():
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
            await (_dispose(producer) if self._flush else _abandon(producer))
            self._flush = True
            if self._gone is not None and not self._gone.done():
                self._gone.set_result(None)
        return connected

    async def _send(self, producer: AIOKafkaProducer, topic: str, record: dict[str, Any]) -> None:
        gone = self._gone
        assert gone is not None, "a producer is available"
        async with asyncio.timeout(self._config.ack_timeout_s):
            acknowledged = await producer.send(topic, **record)
            await asyncio.wait({acknowledged, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not acknowledged.done():
            raise KafkaConnectionError("the producer was replaced before the record was acknowledged")
        acknowledged.result()

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
        # start() asks for a producer id again and again, without an end of its own. It is not cut short where that
        # can be avoided: aiokafka loses sight of the connection that it bootstraps over when it is cancelled.
        starting = asyncio.create_task(producer.start())
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            async with asyncio.timeout(max(CONNECT_TIMEOUT_S, self._config.ack_timeout_s)):
                await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not starting.done():
                await asyncio.wait({starting}, timeout=1.0)
            starting.cancel()
            stopped.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)
        if not starting.cancelled():
            starting.result()

    async def unless_stopped(self, awaitable: Any) -> None:
        """Raises DependencyError when the supervisor stops before the end of the awaitable."""
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
        await _abandon(producer)


async def _abandon(producer: AIOKafkaProducer) -> None:
    """Ends a producer at once; what it has not sent is dropped, and who waits for it is not told."""

    async def no_connection(*_: Any, **__: Any) -> None:
        return None

    client, sender = producer.client, producer._sender.sender_task
    producer._closed = True
    client._get_conn = no_connection  # else a request that is being made would connect anew, and go out
    if sender is not None:
        sender.cancel()
    await client.close()
    if sender is not None:
        # It waits for its requests, which have ended with their connections, or end with the ones being made.
        await asyncio.wait({sender}, timeout=DISPOSE_TIMEOUT_S)
        await client.close()


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event was set in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
