"""One service under test: topics of its own on real Kafka, real Redis, workers in this process or in their own."""

import asyncio
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import LeaveGroupRequest
from redis.asyncio import Redis

from service.settings import Settings, load_settings
from service.stream.assemble import StreamAssembler
from service.stream.reader import Gap, Verdict, read_stream
from service.wire import DeadLetter, Result, Start, parse_dead_letter, parse_result
from service.worker.worker import Worker
from tests.support.configs import stream_config
from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Stream:
    """What a reader saw of one job."""

    assembler: StreamAssembler
    verdict: Verdict
    gaps: list[Gap]
    starts: list[Start]

    @property
    def resumed(self) -> tuple[int, ...]:
        """Of the last attempt, per choice."""
        return self.starts[-1].resumed_tokens

    @property
    def text(self) -> str:
        return self.assembler.choice(0).text


@dataclass
class ServiceUnderTest:
    kafka: KafkaBroker
    redis_server: RedisServer
    environ: dict[str, str]
    results: dict[str, list[Result]] = field(default_factory=lambda: defaultdict(list))
    """All records of the results topic so far, raw duplicates included."""

    def settings(self, **overrides: str) -> Settings:
        return load_settings(
            self.environ | {f"TAILRACE_{key.upper()}": value for key, value in overrides.items()}
        )

    async def publish(self, jobs: Iterable[Mapping[str, Any]]) -> None:
        await self.publish_raw([(str(job["id"]).encode(), orjson.dumps(job)) for job in jobs])

    async def publish_raw(
        self,
        records: Iterable[tuple[bytes | None, bytes | None]],
        *,
        headers: list[tuple[str, bytes]] | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Acknowledged when it returns."""
        producer = AIOKafkaProducer(
            bootstrap_servers=self.kafka.bootstrap, acks="all", max_request_size=16 << 20
        )
        await producer.start()
        try:
            topic = self.environ["TAILRACE_JOBS_TOPIC"]
            sent = [
                await producer.send(topic, value, key=key, headers=headers, timestamp_ms=timestamp_ms)
                for key, value in records
            ]
            await asyncio.gather(*sent)
        finally:
            await producer.stop()

    async def wait_for_results(self, job_ids: Iterable[str], limit_s: float = 60.0) -> dict[str, Result]:
        """The effective result (the last one) of each job, as soon as all have one."""
        wanted = set(job_ids)
        async with self._reading("TAILRACE_RESULTS_TOPIC") as consumer, asyncio.timeout(limit_s):
            self.results.clear()
            while not wanted <= self.results.keys():
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    for record in records:
                        result = parse_result(record.value)
                        assert record.key == result.id.encode()
                        self.results[result.id].append(result)
        return {job_id: self.results[job_id][-1] for job_id in wanted}

    async def read_results(self) -> dict[str, list[Result]]:
        """All records that stand on the results topic now, raw duplicates included, in order."""
        async with self._reading("TAILRACE_RESULTS_TOPIC") as consumer:
            self.results.clear()
            ends = await consumer.end_offsets(list(consumer.assignment()))
            for partition, end in ends.items():
                while await consumer.position(partition) < end:
                    for record in (await consumer.getmany(partition, timeout_ms=200)).get(partition, []):
                        result = parse_result(record.value)
                        self.results[result.id].append(result)
        return self.results

    async def wait_for_dead_letters(self, count: int, limit_s: float = 30.0) -> list[DeadLetter]:
        letters: list[DeadLetter] = []
        async with self._reading("TAILRACE_DEAD_LETTER_TOPIC") as consumer, asyncio.timeout(limit_s):
            while len(letters) < count:
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    letters += [parse_dead_letter(r.key, r.value, list(r.headers)) for r in records]
        return letters

    async def read(self, job_id: str, limit_s: float = 60.0) -> Stream:
        """Follow a job's stream to its end, from wherever it is."""
        assembler, verdict = StreamAssembler(job_id), None
        gaps: list[Gap] = []
        starts: list[Start] = []
        redis = Redis.from_url(self.redis_server.url)
        try:
            async with (
                asyncio.timeout(limit_s),
                aclosing(read_stream(redis, job_id, config=stream_config(), assembler=assembler)) as items,
            ):
                async for item in items:
                    if isinstance(item, Gap):
                        gaps.append(item)
                    elif isinstance(item, Verdict):
                        verdict = item
                    elif isinstance(item, Start):
                        starts.append(item)
        finally:
            await redis.aclose()
        assert verdict is not None, "the stream ended without a verdict"
        return Stream(assembler, verdict, gaps, starts)

    async def wait_for_tokens(self, job_id: str, count: int, limit_s: float = 30.0) -> None:
        """Until this many tokens of a job have been seen live."""
        assembler = StreamAssembler(job_id)
        redis = Redis.from_url(self.redis_server.url)
        try:
            async with (
                asyncio.timeout(limit_s),
                aclosing(read_stream(redis, job_id, config=stream_config(), assembler=assembler)) as items,
            ):
                async for _ in items:
                    if len(assembler.choice(0).token_ids) >= count:
                        return
        finally:
            await redis.aclose()

    async def first_job_of(
        self, worker: str, job_ids: Iterable[str], *, tokens: int, limit_s: float = 30.0
    ) -> str:
        """The first of these jobs that the named worker has brought to this many tokens, without having ended it."""

        async def follow(job_id: str) -> str | None:
            mine = False
            assembler = StreamAssembler(job_id)
            async with aclosing(
                read_stream(redis, job_id, config=stream_config(), assembler=assembler)
            ) as items:
                async for item in items:
                    mine |= isinstance(item, Start) and item.worker == worker
                    if mine and len(assembler.choice(0).token_ids) >= tokens:
                        return None if assembler.end else job_id
            return None

        redis = Redis.from_url(self.redis_server.url)
        tasks = [asyncio.create_task(follow(job_id)) for job_id in job_ids]
        try:
            async with asyncio.timeout(limit_s):
                for done in asyncio.as_completed(tasks):
                    found = await done
                    if found is not None:
                        return found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await redis.aclose()
        raise AssertionError(f"{worker} has ended all of its jobs already")

    def spawn(self, **overrides: str) -> "subprocess.Popen[bytes]":
        """A worker in a process of its own, as an operator starts it."""
        environ = os.environ | self.environ
        environ |= {f"TAILRACE_{key.upper()}": value for key, value in overrides.items()}
        return subprocess.Popen([sys.executable, "-m", "service.cli", "serve"], cwd=ROOT, env=environ)

    async def forget_members(self) -> None:
        """Kafka lets the members of the group go at once, as it does when the sessions of killed ones time out."""
        group = self.environ["TAILRACE_GROUP_ID"]
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka.bootstrap)
        await admin.start()
        try:
            coordinator = await admin.find_coordinator(group)
            (described,) = await admin.describe_consumer_groups([group], coordinator)
            for member_id, *_ in described.groups[0][5]:
                await admin._send_request(LeaveGroupRequest(group, member_id), coordinator)
        finally:
            await admin.close()

    @asynccontextmanager
    async def _reading(self, topic: str) -> AsyncIterator[AIOKafkaConsumer]:
        consumer = AIOKafkaConsumer(
            self.environ[topic], bootstrap_servers=self.kafka.bootstrap, auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            yield consumer
        finally:
            await consumer.stop()


async def new_service(
    kafka: KafkaBroker, redis_server: RedisServer, *, partitions: int = 4, **jobs_topic: str
) -> ServiceUnderTest:
    """Fresh topics and group; the deterministic engine with an instant step unless a test says otherwise.

    `jobs_topic` are settings of that topic, as `KafkaBroker.new_topic` takes them.

    Whether the next step is planned while one runs may be said by the environment, for all tests or for one.
    """
    return ServiceUnderTest(
        kafka,
        redis_server,
        {
            "TAILRACE_KAFKA_BOOTSTRAP": kafka.bootstrap,
            "TAILRACE_REDIS_URL": redis_server.url,
            "TAILRACE_GROUP_ID": kafka.unique("group"),
            "TAILRACE_JOBS_TOPIC": await kafka.new_topic(
                partitions, max_message_bytes=str(16 << 20), **jobs_topic
            ),
            "TAILRACE_RESULTS_TOPIC": await kafka.new_topic(1),
            "TAILRACE_DEAD_LETTER_TOPIC": await kafka.new_topic(1, max_message_bytes=str(16 << 20)),
            "TAILRACE_ENGINE": "deterministic",
            "TAILRACE_ASYNC_SCHEDULING": os.environ.get("TAILRACE_ASYNC_SCHEDULING", ""),
            "TAILRACE_KV_CACHE_BYTES": str(64 << 20),
            "TAILRACE_SESSION_TIMEOUT_S": "6",
            "TAILRACE_DRAIN_GRACE_S": "10",
        },
    )


@asynccontextmanager
async def running_worker(settings: Settings) -> AsyncIterator[Worker]:
    """A worker in this event loop, drained at the end. Its failure is the test's."""
    worker = Worker(settings)
    task = asyncio.create_task(worker.run())
    serving = asyncio.create_task(worker.serving.wait())
    await asyncio.wait({task, serving}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    try:
        yield worker
    finally:
        worker.stop()
        await task
