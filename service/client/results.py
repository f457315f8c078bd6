"""Follows the results topic and hands each awaited terminal record to who waits for it."""

import asyncio
from collections.abc import Iterable

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from service.errors import InternalError
from service.ingest.config import KafkaConfig
from service.ingest.patience import hold_empty_fetches
from service.wire import Result, parse_result

_log = structlog.get_logger(__name__)

POLL_MS = 500
MAX_RECORDS = 500
REBUILD_AFTER_S = 30.0
"""Records are known to be there and none arrives for this long: the consumer is replaced."""


class ResultFollower:
    """Every process sees every result: no consumer group. Only results that somebody expects are kept."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._consumer: AIOKafkaConsumer | None = None
        self._positions: dict[TopicPartition, int] = {}
        self._expected: dict[str, asyncio.Future[Result]] = {}
        self._task: asyncio.Task[None] | None = None
        self._last_record_s = 0.0

    @property
    def num_expected(self) -> int:
        return len(self._expected)

    async def start(self) -> None:
        """Stand at the topic's end: results of jobs published from now on will be seen. Raises KafkaError."""
        await self._connect()
        self._task = asyncio.create_task(self._run(), name="results")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._consumer is not None:
            await self._consumer.stop()
        for future in self._expected.values():
            future.cancel()
        self._expected.clear()

    def expect(self, job_id: str) -> "asyncio.Future[Result]":
        """Call before the job is published. The future of a cancelled waiter is forgotten."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._expected[job_id] = future
        future.add_done_callback(lambda _: self._expected.pop(job_id, None))
        return future

    async def _connect(self) -> None:
        consumer = hold_empty_fetches(
            AIOKafkaConsumer(
                self._config.results_topic,
                group_id=None,
                auto_offset_reset="latest",
                enable_auto_commit=False,
                **self._config.client_options(),
            )
        )
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

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._last_record_s = loop.time()
        while True:
            try:
                await self._poll()
                if self._expected and loop.time() - self._last_record_s > REBUILD_AFTER_S:
                    await self._rebuild_if_stuck()
            except (KafkaError, OSError) as error:
                _log.warning("results_unreadable", error=repr(error))
                await asyncio.sleep(1.0)

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

    async def _rebuild_if_stuck(self) -> None:
        assert self._consumer is not None
        self._last_record_s = asyncio.get_running_loop().time()
        ends = await self._consumer.end_offsets(list(self._positions))
        if any(end > self._positions[partition] for partition, end in ends.items()):
            _log.warning("results_consumer_rebuilt")
            await self._consumer.stop()
            await self._connect()


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
