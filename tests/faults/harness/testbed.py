"""A whole service for one run: its own topics, group and namespace on a Kafka and a Redis, workers in processes, links
that can be cut, and an auditor that watches."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.group import LeaveGroupRequest
from redis.asyncio import Redis

from tests.faults.harness.auditor import Auditor
from tests.faults.harness.ledger import Ledger
from tests.faults.harness.points import Armed, PointServer
from tests.faults.harness.worker_process import WorkerProcess
from tests.support.kafka import KafkaBroker
from tests.support.proxy import Proxy, running_proxy
from tests.support.redis import RedisServer, free_port

PARTITIONS = 4
RETRY_S = 0.1
JOIN_LIMIT_S = 30.0
SESSION_TIMEOUT_S = 6.0


Leave = Callable[[str], Awaitable[None]]
Describe = Callable[[], Awaitable[tuple[str, dict[str, str]]]]


@dataclass
class Testbed:
    """Made by `running_testbed`."""

    __test__ = False

    folder: Path
    kafka: KafkaBroker
    redis_server: RedisServer
    redis_link: Proxy
    """Between the workers and Redis; the auditor has its own way."""
    kafka_link: Proxy | None
    """Between the workers and Kafka, if it is this run's own."""
    environ: dict[str, str]
    ledger: Ledger
    auditor: Auditor
    points: PointServer
    exit_stack: AsyncExitStack
    """For what a fault starts."""
    without: Sequence[str] = ()
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    affected_s: float | None = None
    """`time.monotonic()` when the fault began, or when an outage ended: recovery counts from here."""
    redis_forgets: bool = False
    """Redis loses its memory in this run: a log may begin late, and readers may have seen a gap."""
    live_interrupted: bool = False
    """The auditor's own subscription was cut in this run."""
    may_be_answered_twice: set[str] = field(default_factory=set)
    """Ids under which the run sends several different records on purpose."""
    expected_status: dict[str, str] = field(default_factory=dict)
    """Jobs that the run knows the outcome of."""
    undisturbed: bool = False
    """No job may be interrupted in this run."""
    exit_codes: dict[str, int | None] = field(default_factory=dict)

    @property
    def namespace(self) -> str:
        return self.environ["TAILRACE_NAMESPACE"]

    def start_worker(self, name: str, *, armed: Sequence[Armed] = (), **overrides: str) -> WorkerProcess:
        environ = self.environ | {"TAILRACE_WORKER_ID": name, "TAILRACE_ADMIN_PORT": str(free_port())}
        environ |= {
            key if key.isupper() else f"TAILRACE_{key.upper()}": value for key, value in overrides.items()
        }
        worker = WorkerProcess(
            environ,
            self.folder / f"{name}.log",
            without=self.without,
            armed=armed,
            socket=self.points.socket,
        )
        self.workers[name] = worker
        return worker

    def note_fault(self) -> None:
        """Recovery counts from now."""
        self.affected_s = time.monotonic()

    async def publish(self, bodies: Sequence[dict[str, Any]], *, partition: int | None = None) -> None:
        """Returns when Kafka has acknowledged all of them."""
        await self.publish_records(
            [(str(body["id"]), body, json.dumps(body).encode()) for body in bodies], partition=partition
        )

    async def publish_records(
        self, records: Sequence[tuple[str, dict[str, Any], bytes | None]], *, partition: int | None = None
    ) -> None:
        """Publishes (key, body, value) triples; the body of what is no job is {}."""
        producer = await self._producer()
        try:
            for key, body, _ in records:
                self.ledger.intend(key, body)
            topic = self.environ["TAILRACE_JOBS_TOPIC"]
            sent = [
                await producer.send(topic, value, key=key.encode(), partition=partition)
                for key, _, value in records
            ]
            for (key, body, _), future in zip(records, sent, strict=True):
                placed = await future
                self.ledger.acknowledge(key, body, placed.partition, placed.offset)
        finally:
            await producer.stop()

    async def _producer(self) -> AIOKafkaProducer:
        """Returns one that is connected, however long Kafka is away."""
        while True:
            producer = AIOKafkaProducer(
                bootstrap_servers=self.kafka.bootstrap, acks="all", enable_idempotence=True
            )
            try:
                await producer.start()
            except KafkaConnectionError:
                await producer.stop()
                await asyncio.sleep(RETRY_S)
            else:
                return producer

    async def cancel(self, job_id: str) -> None:
        """As the contract says any process may: a key, and a message."""
        async with Redis.from_url(self.redis_server.url) as redis:
            await redis.set(f"{self.namespace}:{{{job_id}}}:cancel", "1", ex=600)
            await redis.publish(f"{self.namespace}:control", job_id)

    async def joined(self, *workers: str) -> None:
        """Waits until the group consists of these workers and has shared out the partitions."""
        async with asyncio.timeout(JOIN_LIMIT_S):
            while True:
                with contextlib.suppress(KafkaError):  # a broker that just started has no coordinator yet
                    async with self._group() as (_, describe):
                        state, members = await describe()
                    if state == "Stable" and sorted(members.values()) == sorted(workers):
                        return
                await asyncio.sleep(RETRY_S)

    async def forget_keys(self) -> None:
        """Redis loses the keys of this run's namespace, as at FLUSHALL: other runs share the server."""
        self.redis_forgets = True
        async with Redis.from_url(self.redis_server.url) as redis:
            async for key in redis.scan_iter(match=f"{self.namespace}:*", count=1000):
                await redis.delete(key)

    async def forget_members(self, *workers: str) -> None:
        """Kafka lets these members of the group go at once, as when their sessions time out; without names, all."""
        async with self._group() as (leave, describe):
            _, members = await describe()
            for member_id, name in members.items():
                if not workers or name in workers:
                    await leave(member_id)

    @asynccontextmanager
    async def _group(self) -> AsyncIterator[tuple[Leave, Describe]]:
        """Yields two functions: one takes a member out of the group, one tells its state and its members' names."""
        group = self.environ["TAILRACE_GROUP_ID"]
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka.bootstrap)
        try:
            await admin.start()
            coordinator = await admin.find_coordinator(group)

            async def leave(member_id: str) -> None:
                await admin._send_request(LeaveGroupRequest(group, member_id), coordinator)

            async def describe() -> tuple[str, dict[str, str]]:
                (described,) = await admin.describe_consumer_groups([group], coordinator)
                _, _, state, _, _, members = described.groups[0][:6]
                return state, {member_id: client_id for member_id, client_id, *_ in members}

            yield leave, describe
        finally:
            await admin.close()

    async def stop_workers(self) -> None:
        """SIGTERM for all that live; notes how each ended."""
        live = [worker for worker in self.workers.values() if worker.exit_code is None]
        codes = await asyncio.gather(*(worker.terminate() for worker in live))
        self.exit_codes |= {worker.name: code for worker, code in zip(live, codes, strict=True)}


@asynccontextmanager
async def running_testbed(
    folder: Path,
    kafka: KafkaBroker,
    redis_server: RedisServer,
    *,
    partitions: int = PARTITIONS,
    without: Sequence[str] = (),
    **settings: str,
) -> AsyncIterator[Testbed]:
    """Fresh topics, group and namespace. Ends what it started, whatever happens."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    namespace = kafka.unique("bed")
    environ = {
        "TAILRACE_KAFKA_BOOTSTRAP": kafka.bootstrap,
        "TAILRACE_NAMESPACE": namespace,
        "TAILRACE_GROUP_ID": f"{namespace}-group",
        "TAILRACE_JOBS_TOPIC": await kafka.new_topic(partitions, name=f"{namespace}-jobs"),
        "TAILRACE_RESULTS_TOPIC": await kafka.new_topic(1, name=f"{namespace}-results"),
        "TAILRACE_DEAD_LETTER_TOPIC": await kafka.new_topic(1, name=f"{namespace}-dead"),
        "TAILRACE_ENGINE": "deterministic",
        "TAILRACE_DETERMINISTIC_STEP_MS": "10",
        "TAILRACE_MAX_NUM_SEQS": "8",
        "TAILRACE_KV_CACHE_BYTES": str(64 << 20),
        "TAILRACE_SESSION_TIMEOUT_S": f"{SESSION_TIMEOUT_S:g}",
        "TAILRACE_DRAIN_GRACE_S": "10",
    } | {f"TAILRACE_{key.upper()}": value for key, value in settings.items()}
    async with AsyncExitStack() as stack:
        redis_link = await stack.enter_async_context(running_proxy(redis_server.port))
        environ["TAILRACE_REDIS_URL"] = redis_link.url
        kafka_link = None
        if kafka.proxied is not None:
            kafka_link = await stack.enter_async_context(running_proxy(*kafka.proxied))
            environ["TAILRACE_KAFKA_BOOTSTRAP"] = f"127.0.0.1:{kafka_link.port}"
        ledger = Ledger(folder / "ledger.jsonl")
        stack.callback(ledger.close)
        points = PointServer(str(folder / "points"))
        await points.start()
        stack.push_async_callback(points.stop)
        auditor = Auditor(kafka.bootstrap, redis_server.url, environ)
        bed = Testbed(
            folder,
            kafka,
            redis_server,
            redis_link,
            kafka_link,
            environ,
            ledger,
            auditor,
            points,
            stack,
            without,
        )
        stack.callback(lambda: [worker.kill() for worker in bed.workers.values()])
        await auditor.start()
        stack.push_async_callback(auditor.stop)
        yield bed
