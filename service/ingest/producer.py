"""Writes results and dead letters to Kafka, and retries until all replicas have acknowledged them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    BrokerResponseError,
    CorruptRecordException,
    InvalidTimestampError,
    InvalidTopicError,
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
from service.ingest.delivery import ProducerStats
from service.ingest.kafka_config import KafkaConfig
from service.ingest.producer_supervisor import ProducerSupervisor
from service.ingest.topics import ensure_topics
from service.waiting import Backoff, wait_for

log = structlog.get_logger()

BACKOFF_S = 0.2
BACKOFF_MAX_S = 5.0
MAX_REFUSALS = 20
"""Refusals of one record in a row. With the back-off they take about a minute and a half: time to correct a topic's
rights."""
NO_TIMESTAMP = -1
"""Kafka accepts a record without a timestamp whatever its clock says."""

TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
RECORD_REFUSED = (
    CorruptRecordException,
    InvalidTimestampError,
    InvalidTopicError,
    PolicyViolationError,
    UnknownError,
    UnsupportedForMessageFormatError,
)
"""The broker is reachable and refuses this record: no reason to reconnect. UnknownError is what aiokafka makes of
newer codes, INVALID_RECORD among them (no key, on a compacted topic)."""
TOPIC_REFUSED = (TopicAuthorizationFailedError, UnknownTopicOrPartitionError)
"""Refusals that only the operator can end."""


class WithdrawnError(Exception):
    """The sender withdrew the record before it was sent: another worker has the job."""


def _always() -> bool:
    return True


@dataclass(slots=True)
class _Record:
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    optional: bool
    wanted: Callable[[], bool]
    num_refusals: int = field(default=0, init=False)


class ResultProducer:
    """Sends each record until it is acknowledged: at least once, which the keys of the results topic make once.

    Used from one event loop.
    """

    def __init__(self, config: KafkaConfig, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock` gives the seconds that records are stamped with."""
        self._config = config
        self._wall_clock = wall_clock
        self._stamped = True
        self._slots = asyncio.Semaphore(config.max_in_flight_sends)
        self._one_by_one = asyncio.Lock()
        """For records that were refused: a batch is refused whole, and only one record in it may be to blame."""
        self._supervisor = ProducerSupervisor(config)
        self._given_up: DependencyError | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.problem: str | None = None
        """What a reachable broker refuses; None: nothing."""
        self._in_flight = 0

    @property
    def ready(self) -> bool:
        """Whether a producer is connected and the broker refuses nothing."""
        return self._supervisor.available and self.problem is None

    def stats(self) -> ProducerStats:
        return ProducerStats(self.ready, self.problem, self._in_flight, self._supervisor.num_replaced)

    async def run(self) -> None:
        """Runs until `stop()`; waits for a broker that is away.

        Raises DependencyError when Kafka has refused one record MAX_REFUSALS times in a row: this worker then cannot
        end the jobs that it holds, and others may be able to.
        """
        await self._supervisor.run()
        if self._given_up is not None:
            raise self._given_up

    async def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        *,
        optional: bool = False,
        wanted: Callable[[], bool] = _always,
    ) -> None:
        """Returns when the record is acknowledged by all in-sync replicas.

        Waits for a free slot first: at most `max_in_flight_sends` are in flight. Raises JobError for a record
        that is larger than the producer or the topic takes, and for an `optional` one that the topic refuses;
        WithdrawnError once it is no longer `wanted` (asked before each try); DependencyError when stop() ends the wait.
        """
        async with self._slots:
            self._in_flight += 1
            self._idle.clear()
            try:
                # Not both null: aiokafka takes no such record, though other producers write them.
                value = b"" if key is None and value is None else value
                await self._send_until_acknowledged(_Record(topic, key, value, headers, optional, wanted))
            finally:
                self._in_flight -= 1
                if self._in_flight == 0:
                    self._idle.set()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Waits for sends in flight, then ends `run`; a record that is not acknowledged then raises in its send()."""
        if not await wait_for(self._idle, timeout_s):
            log.warning("kafka_sends_given_up", in_flight=self._in_flight, timeout_s=timeout_s)
        await self._supervisor.stop()

    async def _send_until_acknowledged(self, record: _Record) -> None:
        supervisor = self._supervisor
        backoff = Backoff(BACKOFF_S, BACKOFF_MAX_S)
        while True:
            producer = await supervisor.producer()
            if not record.wanted():
                raise WithdrawnError(record.topic)
            try:
                async with self._one_by_one if record.num_refusals else nullcontext():
                    await self._send_once(producer, record)
                self.problem = None
                return
            except TOO_LARGE as error:
                raise self._too_large(record) from error
            except (*RECORD_REFUSED, *TOPIC_REFUSED) as error:
                self._refused(producer, record, error)
                if isinstance(error, UnknownTopicOrPartitionError):
                    await supervisor.unless_stopped(self._make_topics())
                await supervisor.pause(backoff.failed())
            except TimeoutError as error:
                # A topic without metadata times out as well; while others are acknowledged the producer is sound.
                if supervisor.silent_s > self._config.ack_timeout_s:
                    supervisor.replace(producer, error)
                await supervisor.pause(BACKOFF_S)
            except (KafkaError, OSError) as error:
                supervisor.replace(producer, error)
                await supervisor.pause(BACKOFF_S)

    async def _send_once(self, producer: AIOKafkaProducer, record: _Record) -> None:
        await self._supervisor.send(
            producer,
            record.topic,
            value=record.value,
            key=record.key,
            headers=list(record.headers),
            timestamp_ms=int(self._wall_clock() * 1000) if self._stamped else NO_TIMESTAMP,
        )

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
        """Notes that the broker refused a record; decides what else to try.

        Raises JobError for an optional record, DependencyError when it was tried often enough.
        """
        reason = f"{record.topic} refuses a record: {type(error).__name__}"
        log.warning(
            "kafka_record_refused", topic=record.topic, error=repr(error), refusals=record.num_refusals
        )
        if isinstance(error, RECORD_REFUSED):
            # A refused batch leaves a hole in the sequence numbers of the idempotent producer: later ones would fail.
            self._supervisor.replace(producer, error, flush=True)
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
            self._supervisor.end()
            raise self._given_up from error

    async def _make_topics(self) -> None:
        if not self._config.create_topics:
            return
        try:
            await ensure_topics(self._config)
        except (KafkaError, OSError) as error:
            log.warning("kafka_topics_not_created", error=repr(error))
