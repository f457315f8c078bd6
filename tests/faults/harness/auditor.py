"""Reads everything that a service leaves behind, with plain clients and decoders of its own: nothing of the product.

While a run goes on it follows the results and dead-letter topics, listens to all live channels, and samples the
group's commits. At the end it reads every log.
"""

import asyncio
import base64
import contextlib
import json
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from redis.asyncio import Redis
from redis.exceptions import RedisError

SAMPLE_S = 0.15
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Terminal:
    """A record of the results topic."""

    offset: int
    job_id: str
    value: bytes
    seen_s: float

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.value)
        return found


@dataclass(frozen=True, slots=True)
class Commit:
    """A sample of the group's commit for a partition, and how far the results topic went right after it."""

    partition: int
    offset: int
    completed: tuple[tuple[int, int], ...]
    """Half-open ranges beyond the offset."""
    results_end: int
    dead_end: int

    def covers(self, offset: int) -> bool:
        return offset < self.offset or any(first <= offset < end for first, end in self.completed)


@dataclass
class Traces:
    results: list[Terminal] = field(default_factory=list)
    dead_letters: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset on the dead-letter topic, and the partition and offset that the letter names."""
    commits: list[Commit] = field(default_factory=list)
    live: dict[str, list[tuple[float, dict[str, Any]]]] = field(default_factory=dict)
    """By job: when each event was heard (`time.monotonic()`), and the event."""
    logs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    immortal_keys: list[str] = field(default_factory=list)


def decode_commit(offset: int, metadata: str) -> tuple[tuple[int, int], ...]:
    """Reads the map of completed offsets as the contract describes it. Raises ValueError for a malformed one."""
    if not metadata:
        return ()
    prefix, _, text = metadata.partition(":")
    if prefix != "tailrace1":
        raise ValueError(f"unknown commit metadata {metadata!r}")
    body = base64.urlsafe_b64decode(text)
    payload = body[4:]
    expected = zlib.crc32(payload, zlib.crc32(offset.to_bytes(8, "big", signed=True)))
    if int.from_bytes(body[:4], "big") != expected:
        raise ValueError("the checksum of the commit metadata is wrong")
    numbers, number, shift = [], 0, 0
    for byte in payload:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    ranges, position = [], offset
    for skipped, length in zip(numbers[::2], numbers[1::2], strict=True):
        ranges.append((position + skipped, position + skipped + length))
        position += skipped + length
    return tuple(ranges)


class Auditor:
    """Runs from `start` to `stop`; what it has seen is in `traces`."""

    def __init__(self, bootstrap: str, redis_url: str, environ: dict[str, str]) -> None:
        self._bootstrap = bootstrap
        self._redis_url = redis_url
        self._environ = environ
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = [asyncio.Event(), asyncio.Event()]
        self._read_up_to: dict[str, int] = {}
        self._consumer: AIOKafkaConsumer | None = None
        self.changed = asyncio.Condition()
        self.traces = Traces()
        self.num_live_cuts = 0

    async def start(self) -> None:
        """Returns when nothing that happens from now on is missed."""
        self._tasks = [
            asyncio.create_task(self._follow_topics()),
            asyncio.create_task(self._listen()),
            asyncio.create_task(self._sample_commits()),
        ]
        await asyncio.gather(*(ready.wait() for ready in self._ready))

    def redirect(self, redis_url: str) -> None:
        """The next connection to Redis goes to another server."""
        self._redis_url = redis_url

    async def stop(self) -> None:
        """Raises what ended a part of it before."""
        broken = [task.exception() for task in self._tasks if task.done() and not task.cancelled()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in broken:
            raise RuntimeError("the auditor broke") from error

    def ended(self) -> set[str]:
        return {record.job_id for record in self.traces.results}

    async def wait_until_ended(self, job_ids: Iterable[str], limit_s: float) -> set[str]:
        """Returns the jobs that have no terminal record within the limit; none is good."""
        wanted = set(job_ids)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), self.changed:
                await self.changed.wait_for(lambda: wanted <= self.ended())
        return wanted - self.ended()

    async def wait_for_events(self, job_id: str, kind: str, count: int, limit_s: float) -> bool:
        """Waits until that many events of a kind were heard live."""

        def heard() -> bool:
            events = self.traces.live.get(job_id, [])
            return sum(event["kind"] == kind for _, event in events) >= count

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), self.changed:
                await self.changed.wait_for(heard)
        return heard()

    async def read_to_the_end(self) -> None:
        """Reads what the topics hold now; call it after the last event of a run."""
        ends = await self._ends()
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(
                lambda: all(self._read_up_to.get(topic, 0) >= end for topic, end in ends.items())
            )

    async def read_logs(self, job_ids: Iterable[str]) -> None:
        """Reads every job's log as it is now, and looks for keys that would never expire."""
        namespace = self._environ["TAILRACE_NAMESPACE"]
        async with Redis.from_url(self._redis_url) as redis:
            for job_id in job_ids:
                entries = await redis.xrange(f"{namespace}:{{{job_id}}}:log")
                self.traces.logs[job_id] = [json.loads(fields[b"event"]) for _, fields in entries]
            async for key in redis.scan_iter(match=f"{namespace}:*", count=1000):
                if await redis.ttl(key) == -1:
                    self.traces.immortal_keys.append(key.decode())

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _follow_topics(self) -> None:
        results, dead = self._environ["TAILRACE_RESULTS_TOPIC"], self._environ["TAILRACE_DEAD_LETTER_TOPIC"]
        consumer = AIOKafkaConsumer(
            results, dead, bootstrap_servers=self._bootstrap, auto_offset_reset="earliest"
        )
        await consumer.start()
        self._consumer = consumer
        self._ready[0].set()
        try:
            while True:
                batches = await consumer.getmany(timeout_ms=100)
                now_s = time.monotonic()
                for partition, records in batches.items():
                    for record in records:
                        if partition.topic == results:
                            found = Terminal(record.offset, record.key.decode(), record.value, now_s)
                            self.traces.results.append(found)
                        else:
                            headers = dict(record.headers)
                            origin = int(headers["tailrace-dl-partition"]), int(headers["tailrace-dl-offset"])
                            self.traces.dead_letters.append((record.offset, *origin))
                for partition in consumer.assignment():
                    self._read_up_to[partition.topic] = await consumer.position(partition)
                await self._tell()
        finally:
            await consumer.stop()

    async def _listen(self) -> None:
        pattern = f"{self._environ['TAILRACE_NAMESPACE']}:{{*}}:live"
        while True:
            try:
                async with Redis.from_url(self._redis_url) as redis, redis.pubsub() as pubsub:
                    await pubsub.psubscribe(pattern)
                    async for message in pubsub.listen():
                        if message["type"] == "psubscribe":
                            self._ready[1].set()
                            continue
                        if not message["data"].startswith(b"{"):
                            continue  # a worker that starts tries whether it may publish at all
                        event = json.loads(message["data"])
                        self.traces.live.setdefault(event["id"], []).append((time.monotonic(), event))
                        await self._tell()
            except (RedisError, OSError):
                self.num_live_cuts += 1
                await asyncio.sleep(RETRY_S)

    async def _ends(self) -> dict[str, int]:
        names = ("TAILRACE_RESULTS_TOPIC", "TAILRACE_DEAD_LETTER_TOPIC")
        partitions = [TopicPartition(self._environ[name], 0) for name in names]
        assert self._consumer is not None
        return {each.topic: end for each, end in (await self._consumer.end_offsets(partitions)).items()}

    async def _sample_commits(self) -> None:
        while True:
            try:
                await self._sample_while_connected()
            except (KafkaError, OSError, TimeoutError, AttributeError):
                await asyncio.sleep(RETRY_S)

    async def _sample_while_connected(self) -> None:
        topic = self._environ["TAILRACE_JOBS_TOPIC"]
        await self._ready[0].wait()
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        try:
            await admin.start()
            while True:
                await asyncio.sleep(SAMPLE_S)
                offsets = await admin.list_consumer_group_offsets(self._environ["TAILRACE_GROUP_ID"])
                ends = await self._ends()
                for partition, found in offsets.items():
                    if partition.topic == topic and found.offset >= 0:
                        self.traces.commits.append(
                            Commit(
                                partition.partition,
                                found.offset,
                                decode_commit(found.offset, found.metadata),
                                ends[self._environ["TAILRACE_RESULTS_TOPIC"]],
                                ends[self._environ["TAILRACE_DEAD_LETTER_TOPIC"]],
                            )
                        )
        finally:
            await admin.close()
