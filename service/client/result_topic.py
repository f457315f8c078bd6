"""Reads the results topic: follows it for awaited results, and searches it for earlier ones."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import ConsumerStoppedError, KafkaError

from service.errors import InternalError
from service.ingest.kafka_clients import close_consumer, make_topic_reader, start_client
from service.ingest.kafka_config import KafkaConfig
from service.waiting import cancellation_kept, wait_for
from service.wire import Result, parse_result

_log = structlog.get_logger(__name__)

POLL_MS = 500
MAX_RECORDS = 500
REBUILD_AFTER_S = 30.0
"""The consumer is replaced when the topic holds records and none arrives for this long."""
RECONNECT_S = 1.0
STOP_TIMEOUT_S = 5.0
MAX_FAILURES = 3
"""Unexpected errors in a row after which the waiting callers get InternalError."""


class _StuckError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class FollowerStats:
    """A snapshot of a ResultFollower."""

    connected: bool
    num_expected: int
    """Results that callers wait for."""
    num_reconnects: int
    """How often a consumer was replaced, over the follower's life."""


class ResultFollower:
    """Follows the results topic outside any consumer group, and keeps only the results that a caller expects."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._consumer: AIOKafkaConsumer | None = None
        self._positions: dict[TopicPartition, int] = {}
        self._expected: dict[str, list[asyncio.Future[Result]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        """Read besides the cancellation, which aiokafka can swallow."""
        self._last_record_s = 0.0
        self._num_failures = 0
        """Unexpected errors in a row."""
        self._num_reconnects = 0

    def stats(self) -> FollowerStats:
        return FollowerStats(self._consumer is not None, len(self._waiting()), self._num_reconnects)

    async def start(self) -> None:
        """Begins at the topic's end: results of jobs published from now on are seen. Raises KafkaError or OSError."""
        await self._connect()
        self._task = asyncio.create_task(self._run(), name="results")

    async def stop(self) -> None:
        """Ends in bounded time; cancels the futures of callers that still wait."""
        self._stopping.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        await self._disconnect()
        for future in self._waiting():
            future.cancel()
        self._expected.clear()

    def expect(self, job_id: str) -> "asyncio.Future[Result]":
        """Returns a future of the job's result; call before the job is published. A cancelled future is forgotten.

        The future ends in InternalError when the record is no result, or when the topic cannot be followed any more
        for another reason than an unreachable broker.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._expected.setdefault(job_id, []).append(future)
        future.add_done_callback(lambda done: self._forget(job_id, done))
        return future

    def _forget(self, job_id: str, future: "asyncio.Future[Result]") -> None:
        waiting = self._expected.get(job_id, [])
        if future in waiting:
            waiting.remove(future)
        if not waiting:
            self._expected.pop(job_id, None)

    def _waiting(self) -> "list[asyncio.Future[Result]]":
        return [future for futures in self._expected.values() for future in futures]

    async def _connect(self) -> None:
        consumer = make_topic_reader(self._config, self._config.results_topic, start="latest")
        try:
            await start_client(consumer)
            for partition in consumer.assignment():
                if partition in self._positions:
                    consumer.seek(partition, self._positions[partition])
                self._positions[partition] = await consumer.position(partition)
        except BaseException:
            await close_consumer(consumer)
            raise
        self._consumer = consumer

    async def _disconnect(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await close_consumer(consumer)

    async def _run(self) -> None:
        """Follows the topic until it is cancelled, with a new consumer whenever one fails.

        An error that a reconnect does not fix is raised in all waiting callers, which would otherwise wait forever.
        """
        while not self._stopping.is_set():
            try:
                with cancellation_kept():
                    await self._follow()
            except (KafkaError, OSError, TimeoutError, ConsumerStoppedError, _StuckError) as error:
                _log.warning("results_unreadable", error=repr(error), action="connecting anew")
            except Exception as error:
                self._num_failures += 1
                _log.exception("results_follower_failed", failures=self._num_failures)
                if self._num_failures >= MAX_FAILURES:
                    self._fail_waiters(error)
            await self._disconnect()
            self._num_reconnects += 1
            await wait_for(self._stopping, RECONNECT_S)

    async def _follow(self) -> None:
        """Polls until told to stop; raises when the consumer should be replaced."""
        if self._consumer is None:
            await self._connect()
        self._last_record_s = asyncio.get_running_loop().time()
        while not self._stopping.is_set():
            await self._poll()
            self._num_failures = 0
            await self._check_progress()

    def _fail_waiters(self, error: Exception) -> None:
        for future in self._waiting():
            if not future.done():
                future.set_exception(InternalError(f"the results topic cannot be followed: {error!r}"))

    async def _poll(self) -> None:
        assert self._consumer is not None
        batches = await self._consumer.getmany(timeout_ms=POLL_MS, max_records=MAX_RECORDS)
        for partition, records in batches.items():
            self._positions[partition] = records[-1].offset + 1
            self._last_record_s = asyncio.get_running_loop().time()
            for record in records:
                self._take(record.key, record.value)

    def _take(self, key: bytes | None, value: bytes | None) -> None:
        waiting = self._expected.get((key or b"").decode(errors="replace"))
        if waiting is None or value is None:
            return
        for future in [each for each in waiting if not each.done()]:
            try:
                future.set_result(parse_result(value))
            except InternalError as error:
                future.set_exception(error)

    async def _check_progress(self) -> None:
        """Raises _StuckError when records are there and none arrives, as aiokafka's fetcher can leave it (#703)."""
        assert self._consumer is not None
        now_s = asyncio.get_running_loop().time()
        if not self._expected or now_s - self._last_record_s <= REBUILD_AFTER_S:
            return
        self._last_record_s = now_s
        ends = await self._consumer.end_offsets(list(self._positions))
        if any(end > self._positions[partition] for partition, end in ends.items()):
            raise _StuckError("records are there and none arrives")


async def read_results(config: KafkaConfig, job_ids: Iterable[str]) -> dict[str, Result]:
    """Returns the last result of each of these jobs that has one on the topic now. Reads the whole topic.

    Raises KafkaError or OSError when Kafka is unreachable, TimeoutError when records are there and none arrives for
    `REBUILD_AFTER_S`, InternalError for a record that is no result.
    """
    wanted = set(job_ids)
    found: dict[str, Result] = {}
    consumer = make_topic_reader(config, config.results_topic, start="earliest")
    try:
        await start_client(consumer)
        ends = await consumer.end_offsets(list(consumer.assignment()))
        async with asyncio.timeout(REBUILD_AFTER_S) as limit:
            while await _behind(consumer, ends):
                for records in (await consumer.getmany(timeout_ms=POLL_MS, max_records=MAX_RECORDS)).values():
                    limit.reschedule(asyncio.get_running_loop().time() + REBUILD_AFTER_S)
                    for record in records:
                        job_id = (record.key or b"").decode(errors="replace")
                        if job_id in wanted and record.value is not None:
                            found[job_id] = parse_result(record.value)
    finally:
        await close_consumer(consumer)
    return found


async def _behind(consumer: AIOKafkaConsumer, ends: dict[TopicPartition, int]) -> bool:
    for partition, end in ends.items():
        if await consumer.position(partition) < end:
            return True
    return False
