"""Results and dead letters out to Kafka: acknowledged by all replicas, or sent again."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    BrokerResponseError,
    CorruptRecordException,
    InvalidTimestampError,
    InvalidTopicError,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownError,
    UnknownTopicOrPartitionError,
    UnsupportedForMessageFormatError,
)

from service.errors import DependencyError, JobError
from service.ingest.config import KafkaConfig
from service.ingest.topics import ensure_topics

log = structlog.get_logger()

DISPOSE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
BACKOFF_S = 0.2
BACKOFF_MAX_S = 5.0
MAX_REFUSALS = 20
"""Of one record in a row. With the back-off that is about a minute and a half: time to mend a topic's rights."""
NO_TIMESTAMP = -1
"""Kafka takes a record without one whatever its clock says."""

TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
RECORD_REFUSED = (
    CorruptRecordException,
    InvalidTimestampError,
    InvalidTopicError,
    PolicyViolationError,
    UnknownError,
    UnsupportedForMessageFormatError,
)
"""The broker is there and will not take this record: no reason to connect anew. UnknownError is what aiokafka makes
of newer codes, INVALID_RECORD among them (no key, on a compacted topic)."""
TOPIC_REFUSED = (TopicAuthorizationFailedError, UnknownTopicOrPartitionError)
"""The operator's to mend, and mended without us."""


class WithdrawnError(Exception):
    """The sender does not want the record sent any more: the job is another worker's."""


def _always() -> bool:
    return True


@dataclass(slots=True)
class _Record:
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]
    optional: bool
    wanted: Callable[[], bool]
    num_refusals: int = field(default=0, init=False)


class ResultProducer:
    """An idempotent producer under supervision; used from one event loop.

    aiokafka can end up with a producer in which every send fails (#1133) or none is ever acknowledged. It is
    then replaced and the records are sent again: at least once, which the keyed results topic makes once.
    """

    def __init__(self, config: KafkaConfig, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock` gives the seconds that records are stamped with."""
        self._config = config
        self._wall_clock = wall_clock
        self._stamped = True
        self._slots = asyncio.Semaphore(config.max_in_flight_sends)
        self._one_by_one = asyncio.Lock()
        """For records that were refused: a batch is refused whole, and only one record in it may be to blame."""
        self._stopped = asyncio.Event()
        self._producer: AIOKafkaProducer | None = None
        self._available = asyncio.Event()
        self._broken = asyncio.Event()
        self._given_up: DependencyError | None = None
        self._ended = asyncio.Event()
        self._ended.set()
        self._flush = True
        self._gone: asyncio.Future[None] | None = None
        """Resolves when the producer of now was replaced and will acknowledge nothing more."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._acknowledged_s = 0.0
        self.problem: str | None = None
        """What the broker refuses, though it can be reached; None: nothing."""
        self.in_flight = 0
        self.rebuilds = 0

    @property
    def ready(self) -> bool:
        return self._available.is_set() and self.problem is None

    async def run(self) -> None:
        """Keep one working producer until `stop()`; a broker that is away is waited for.

        Raises DependencyError when Kafka has refused one record MAX_REFUSALS times in a row: this worker then cannot
        end the jobs that it holds, and others may be able to.
        """
        self._ended.clear()
        try:
            await self._supervise()
        finally:
            self._stopped.set()
            self._ended.set()
        if self._given_up is not None:
            raise self._given_up

    async def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]] = (),
        *,
        optional: bool = False,
        wanted: Callable[[], bool] = _always,
    ) -> None:
        """Returns when the record is acknowledged by all in-sync replicas.

        Waits for a free slot first: at most `max_in_flight_sends` are under way. Raises JobError for a record
        that is larger than the producer or the topic takes, and for an `optional` one that the topic refuses;
        WithdrawnError once it is no longer `wanted` (asked before each try); DependencyError when stop() ends the wait.
        """
        async with self._slots:
            self.in_flight += 1
            self._idle.clear()
            try:
                # Not both null: aiokafka takes no such record, though other producers write them.
                value = b"" if key is None and value is None else value
                await self._send_until_acknowledged(_Record(topic, key, value, headers, optional, wanted))
            finally:
                self.in_flight -= 1
                if self.in_flight == 0:
                    self._idle.set()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Waits for sends under way, then ends `run`; what is not acknowledged by then raises in its send()."""
        if not await _wait_for(self._idle, timeout_s):
            log.warning("kafka_sends_given_up", in_flight=self.in_flight, timeout_s=timeout_s)
        self._end()
        await _wait_for(self._ended, 2 * DISPOSE_TIMEOUT_S)

    async def _send_until_acknowledged(self, record: _Record) -> None:
        backoff_s = BACKOFF_S
        while True:
            await self._unless_stopped(self._available.wait())
            if not record.wanted():
                raise WithdrawnError(record.topic)
            producer = self._producer
            if producer is None:
                continue
            try:
                async with self._one_by_one if record.num_refusals else nullcontext():
                    await self._unless_stopped(self._send_once(producer, record))
                self.problem = None
                return
            except TOO_LARGE as error:
                raise self._too_large(record) from error
            except (*RECORD_REFUSED, *TOPIC_REFUSED) as error:
                self._refused(producer, record, error)
                if isinstance(error, UnknownTopicOrPartitionError):
                    await self._unless_stopped(self._make_topics())
                await _wait_for(self._stopped, backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            except TimeoutError as error:
                # A topic without metadata times out as well; while others are acknowledged the producer is
                # sound.
                if time.monotonic() - self._acknowledged_s > self._config.ack_timeout_s:
                    self._replace(producer, error)
                await _wait_for(self._stopped, BACKOFF_S)
            except (KafkaError, OSError) as error:
                self._replace(producer, error)
                await _wait_for(self._stopped, BACKOFF_S)

    def _too_large(self, record: _Record) -> JobError:
        size = len(record.key or b"") + len(record.value or b"")
        limit = self._config.max_message_bytes
        return JobError(
            "record_too_large",
            f"a record for {record.topic} has {size} bytes; the limit is {limit}, or what the topic sets",
            field="value",
            value=size,
            limit=limit,
        )

    def _refused(self, producer: AIOKafkaProducer, record: _Record, error: BrokerResponseError) -> None:
        """Notes that the broker would not take a record; decides what else to try.

        Raises JobError for an optional record, DependencyError when it was tried often enough.
        """
        reason = f"{record.topic} refuses a record: {type(error).__name__}"
        log.warning(
            "kafka_record_refused", topic=record.topic, error=repr(error), refusals=record.num_refusals
        )
        if isinstance(error, RECORD_REFUSED):
            # A refused batch leaves a hole in the sequence numbers of the idempotent producer: later ones would fail.
            self._replace(producer, error, flush=True)
        if isinstance(error, InvalidTimestampError) and self._stamped:
            log.warning("kafka_clock_differs", action="records are sent without a timestamp from now on")
            self._stamped = False
            return
        record.num_refusals += 1
        if record.optional and isinstance(error, RECORD_REFUSED) and record.num_refusals > 1:
            raise JobError("record_refused", reason) from error
        self.problem = reason
        if record.num_refusals >= MAX_REFUSALS:
            message = f"{reason}, {record.num_refusals} times in a row; this worker gives its partitions up"
            self._given_up = DependencyError(message)
            self._end()
            raise self._given_up from error

    async def _make_topics(self) -> None:
        if not self._config.create_topics:
            return
        try:
            await ensure_topics(self._config)
        except (KafkaError, OSError) as error:
            log.warning("kafka_topics_not_created", error=repr(error))

    async def _send_once(self, producer: AIOKafkaProducer, record: _Record) -> None:
        stamp_ms = int(self._wall_clock() * 1000) if self._stamped else NO_TIMESTAMP
        gone = self._gone
        async with asyncio.timeout(self._config.ack_timeout_s):
            acknowledged = await producer.send(
                record.topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers),
                timestamp_ms=stamp_ms,
            )
            assert gone is not None, "a producer is available"
            await asyncio.wait({acknowledged, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not acknowledged.done():
            raise KafkaConnectionError("the producer was replaced before the record was acknowledged")
        acknowledged.result()
        self._acknowledged_s = time.monotonic()

    def _replace(self, producer: AIOKafkaProducer, error: BaseException, *, flush: bool = False) -> None:
        """Asks for a new producer, once for all the sends that failed with the old one.

        Without `flush` what the old one still holds is dropped, so that nothing of it arrives after it was sent anew,
        or withdrawn.
        """
        if self._producer is producer and not self._stopped.is_set():
            log.warning(
                "kafka_producer_replaced", error=repr(error), action="rebuilding", in_flight=self.in_flight
            )
            self.rebuilds += 1
            self._producer = None
            self._flush = flush
            self._available.clear()
            self._broken.set()

    def _end(self) -> None:
        self._stopped.set()
        self._broken.set()

    async def _supervise(self) -> None:
        """Keeps one working producer: connects, waits until it breaks, disposes of it, and again."""
        backoff_s = BACKOFF_S
        while not self._stopped.is_set():
            producer = self._make_producer()
            try:
                await self._connect(producer)
                backoff_s = BACKOFF_S
                self._acknowledged_s = time.monotonic()
                self._broken.clear()
                self._gone = asyncio.get_running_loop().create_future()
                self._producer = producer
                self._available.set()
                if not self._stopped.is_set():
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
            await _wait_for(self._stopped, backoff_s)
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


async def _wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
