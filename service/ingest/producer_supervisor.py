"""Keeps one working aiokafka producer: connects it, waits until it breaks, closes it, and starts over."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, KafkaError

from service.errors import DependencyError
from service.ingest.kafka_clients import (
    CLOSE_TIMEOUT_S,
    abandon_producer,
    close_producer,
    make_producer,
    start_client,
)
from service.ingest.kafka_config import KafkaConfig
from service.waiting import Backoff, completes_before, wait_for

log = structlog.get_logger()

CONNECT_TIMEOUT_S = 5.0
BACKOFF_S = 0.2


class ProducerSupervisor:
    """Owns the one aiokafka producer of the process; used from one event loop.

    aiokafka can end up with a producer in which every send fails (#1133) or none is ever acknowledged: `replace` asks
    for another one.
    """

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
        """Resolves when the current producer was replaced and will acknowledge nothing more."""
        self._acknowledged_s = 0.0
        self.num_replaced = 0

    @property
    def available(self) -> bool:
        return self._available.is_set()

    @property
    def silent_s(self) -> float:
        """Returns the seconds since a record was last acknowledged, or since the connection was made."""
        return time.monotonic() - self._acknowledged_s

    async def run(self) -> None:
        """Runs until `stop()`; waits for a broker that is away."""
        self._ended.clear()
        backoff = Backoff(BACKOFF_S, self._config.retry_backoff_max_s)
        try:
            while not self._stopped.is_set():
                if await self._serve():
                    backoff.succeeded()
                await self.pause(backoff.failed())
        finally:
            self._stopped.set()
            self._ended.set()

    def end(self) -> None:
        """Makes `run` return, and everything that waits for a producer raise."""
        self._stopped.set()
        self._broken.set()

    async def stop(self) -> None:
        """Calls `end` and waits for `run`, in bounded time."""
        self.end()
        await wait_for(self._ended, 2 * CLOSE_TIMEOUT_S)

    async def producer(self) -> AIOKafkaProducer:
        """Returns the working producer, however long the broker is away. Raises DependencyError after `end()`."""
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

        Without `flush` what the old one still holds is dropped, so that no record arrives after it was sent again or
        withdrawn.
        """
        if self._producer is producer and not self._stopped.is_set():
            log.warning("kafka_producer_replaced", error=repr(error))
            self.num_replaced += 1
            self._producer = None
            self._flush = flush
            self._available.clear()
            self._broken.set()

    async def pause(self, seconds: float) -> None:
        """Waits; ends early when the supervisor stops."""
        await wait_for(self._stopped, seconds)

    async def _serve(self) -> bool:
        """Runs one aiokafka producer until it ends; returns whether it ever connected."""
        producer, connected = make_producer(self._config), False
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
                "kafka_unavailable",
                bootstrap=self._config.kafka_bootstrap,
                error=str(error),
                action="retrying",
            )
        finally:
            self._producer = None
            self._available.clear()
            await (close_producer(producer) if self._flush else abandon_producer(producer))
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

    async def _connect(self, producer: AIOKafkaProducer) -> None:
        # start() asks for a producer id without limit.
        async with asyncio.timeout(max(CONNECT_TIMEOUT_S, self._config.ack_timeout_s)):
            await completes_before(self._stopped, start_client(producer))

    async def unless_stopped(self, work: Awaitable[object]) -> None:
        """Runs `work` to its end. Raises DependencyError when the supervisor stops before."""
        if not await completes_before(self._stopped, work):
            raise DependencyError("the producer was stopped before Kafka acknowledged the record")
