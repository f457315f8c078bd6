"""Follows the results topic and hands each awaited terminal record to who waits for it."""

import asyncio
import contextlib
from collections.abc import Iterable

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import ConsumerStoppedError, KafkaError

from service.errors import InternalError
from service.ingest.config import KafkaConfig
from service.ingest.fetch_throttle import FetchThrottle
from service.wire import Result, parse_result

_log = structlog.get_logger(__name__)

POLL_MS = 500
MAX_RECORDS = 500
REBUILD_AFTER_S = 30.0
"""Records are known to be there and none arrives for this long: the consumer is replaced."""
RECONNECT_S = 1.0
STOP_TIMEOUT_S = 5.0
MAX_FAILURES = 3
"""Unexpected errors in a row, before those who wait are told."""


class _StuckError(Exception):
    pass


class ResultFollower:
    """Every process sees every result: no consumer group. Only results that somebody expects are kept."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._consumer: AIOKafkaConsumer | None = None
        self._positions: dict[TopicPartition, int] = {}
        self._expected: dict[str, asyncio.Future[Result]] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        """Looked at as well: somewhere below aiokafka a cancellation can get lost."""
        self._last_record_s = 0.0

    @property
    def num_expected(self) -> int:
        return len(self._expected)

    async def start(self) -> None:
        """Stand at the topic's end: results of jobs published from now on will be seen. Raises KafkaError."""
        await self._connect()
        self._task = asyncio.create_task(self._run(), name="results")

    async def stop(self) -> None:
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._disconnect()
        for future in self._expected.values():
            future.cancel()
        self._expected.clear()

    def expect(self, job_id: str) -> "asyncio.Future[Result]":
        """Call before the job is published. The future of a cancelled waiter is forgotten.

        It ends in InternalError when the topic cannot be followed any more, for another reason than a broker that is
        away.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._expected[job_id] = future
        future.add_done_callback(lambda _: self._expected.pop(job_id, None))
        return future

    async def _connect(self) -> None:
        consumer = AIOKafkaConsumer(
            self._config.results_topic,
            group_id=None,
            auto_offset_reset="latest",
            enable_auto_commit=False,
            **self._config.client_options(),
        )
        FetchThrottle.install(consumer)
        try:
            await consumer.start()
            for partition in consumer.assignment():
                if partition in self._positions:
                    consumer.seek(partition, self._positions[partition])
                self._positions[partition] = await consumer.position(partition)
        except BaseException:
            await consumer.stop()
            raise
        self._consumer = consumer

    async def _disconnect(self) -> None:
        """Never raises: the consumer may be in any state."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with contextlib.suppress(KafkaError, OSError, TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await consumer.stop()

    async def _run(self) -> None:
        """Follows the topic until it is cancelled, with a new consumer whenever one fails.

        What no reconnect can mend is told to all who wait, instead of leaving them to wait for ever.
        """
        num_failures = 0
        while not self._stopping:
            try:
                if self._consumer is None:
                    await self._connect()
                self._last_record_s = asyncio.get_running_loop().time()
                while not self._stopping:
                    await self._poll()
                    num_failures = 0
                    await self._check_progress()
            except (KafkaError, OSError, TimeoutError, ConsumerStoppedError, _StuckError) as error:
                _log.warning("results_unreadable", error=repr(error), action="connecting anew")
            except Exception as error:
                num_failures += 1
                _log.exception("results_follower_failed", failures=num_failures)
                if num_failures >= MAX_FAILURES:
                    self._fail_waiters(error)
            await self._disconnect()
            await asyncio.sleep(RECONNECT_S)

    def _fail_waiters(self, error: Exception) -> None:
        for future in list(self._expected.values()):
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
        future = self._expected.get((key or b"").decode(errors="replace"))
        if future is None or future.done() or value is None:
            return
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
    """Results of these jobs that stand on the topic now, the last of each. Reads the whole topic."""
    wanted = set(job_ids)
    found: dict[str, Result] = {}
    consumer = AIOKafkaConsumer(
        config.results_topic, group_id=None, auto_offset_reset="earliest", **config.client_options()
    )
    try:
        await consumer.start()
        ends = await consumer.end_offsets(list(consumer.assignment()))
        while await _behind(consumer, ends):
            for records in (await consumer.getmany(timeout_ms=POLL_MS, max_records=MAX_RECORDS)).values():
                for record in records:
                    job_id = (record.key or b"").decode(errors="replace")
                    if job_id in wanted and record.value is not None:
                        found[job_id] = parse_result(record.value)
    finally:
        await consumer.stop()
    return found


async def _behind(consumer: AIOKafkaConsumer, ends: dict[TopicPartition, int]) -> bool:
    for partition, end in ends.items():
        if await consumer.position(partition) < end:
            return True
    return False
