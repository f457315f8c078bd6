"""The faults, each with the mechanism without which it would break a guarantee."""

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from redis.asyncio import Redis

from tests.faults.harness.jobs import job
from tests.faults.harness.runs import Fault
from tests.faults.harness.testbed import PARTITIONS, SESSION_TIMEOUT_S, Testbed
from tests.support.proxy import Direction
from tests.support.redis import RedisServer, new_server

FAULTS: dict[str, Fault] = {}
Inject = Callable[[Testbed, random.Random], Awaitable[None]]

KILLER = "killer"
MOST_RESTARTS = 12
PAUSE_S = (0.2, 1.5)
"""How long an outage lasts, unless the fault is about its length."""


def _fault(name: str, control: str, **options: Any) -> Callable[[Inject], Inject]:
    def register(inject: Inject) -> Inject:
        FAULTS[name] = Fault(name, inject, control, **options)
        return inject

    return register


def _victim(bed: Testbed, draw: random.Random) -> str:
    return draw.choice(sorted(name for name, worker in bed.workers.items() if worker.exit_code is None))


@_fault(
    "jobs longer than the poll interval",
    control="polling while full",
    workers=1,
    control_limit_s=90,
    settings={
        "max_poll_interval_s": "10",
        "max_num_seqs": "4",
        "max_waiting": "16",
        "deterministic_step_ms": "60",
    },
)
async def _long_jobs(bed: Testbed, draw: random.Random) -> None:
    """The worker has no room for most of the jobs for longer than the interval."""
    del draw
    bed.undisturbed = True


@_fault("worker killed", control="commit after completion")
async def _kill(bed: Testbed, draw: random.Random) -> None:
    bed.workers[_victim(bed, draw)].kill()
    bed.note_fault()


@_fault("workers killed again and again, with cancellations", control="resume", workers=3)
async def _kill_storm(bed: Testbed, draw: random.Random) -> None:
    for round_ in range(3):
        for job_id in draw.sample(sorted(bed.ledger.bodies), 4):
            await bed.cancel(job_id)
        bed.workers[_victim(bed, draw)].kill()
        bed.start_worker(f"replacement-{round_}")
        await asyncio.sleep(draw.uniform(*PAUSE_S))
    bed.note_fault()


@_fault("worker told to stop while another joins", control="commit after completion")
async def _rolling(bed: Testbed, draw: random.Random) -> None:
    bed.note_fault()
    bed.start_worker("joining")
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    name = _victim(bed, draw)
    bed.exit_codes[name] = await bed.workers[name].terminate()


@_fault("worker stopped and woken after its session", control="fence")
async def _zombie(bed: Testbed, draw: random.Random) -> None:
    victim = bed.workers[_victim(bed, draw)]
    victim.signal(signal.SIGSTOP)
    bed.note_fault()
    await asyncio.sleep(SESSION_TIMEOUT_S + draw.uniform(*PAUSE_S))
    victim.signal(signal.SIGCONT)


@_fault("links to Redis cut", control="reconnecting to Redis")
async def _cut_redis(bed: Testbed, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 5)):
        bed.redis_link.cut()
        bed.note_fault()
        await asyncio.sleep(draw.uniform(0.0, 0.3))


@_fault("requests to Redis lost without an error", control="reconnecting to Redis")
async def _redis_one_way(bed: Testbed, draw: random.Random) -> None:
    bed.redis_link.stall("to_server")
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    bed.redis_link.cut()
    bed.redis_link.resume()
    bed.note_fault()


@_fault("replies of Redis lost without an error", control="reconnecting to Redis")
async def _redis_half_open(bed: Testbed, draw: random.Random) -> None:
    bed.redis_link.stall("to_client")
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    bed.redis_link.cut()
    bed.redis_link.resume()
    bed.note_fault()


@_fault("Redis killed and empty", control="reconnecting to Redis", own_servers=True)
async def _redis_killed(bed: Testbed, draw: random.Random) -> None:
    bed.redis_forgets = bed.live_interrupted = True
    await asyncio.to_thread(bed.redis_server.stop)
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    await asyncio.to_thread(bed.redis_server.start)
    bed.note_fault()


@_fault("Redis emptied", control="keys written again")
async def _flush(bed: Testbed, draw: random.Random) -> None:
    del draw
    bed.redis_forgets = True
    await _forget(bed)
    bed.note_fault()


@_fault("Redis emptied and a worker killed", control="commit after completion")
async def _flush_and_kill(bed: Testbed, draw: random.Random) -> None:
    bed.redis_forgets = True
    await _forget(bed)
    bed.workers[_victim(bed, draw)].kill()
    bed.note_fault()


async def _forget(bed: Testbed) -> None:
    """Removes the keys of this run's namespace, as FLUSHALL does: other runs share the server."""
    async with Redis.from_url(bed.redis_server.url) as redis:
        keys = [key async for key in redis.scan_iter(match=f"{bed.namespace}:*", count=1000)]
        if keys:
            await redis.delete(*keys)


@_fault("Redis paused", control="deltas kept while Redis is silent")
async def _redis_paused(bed: Testbed, draw: random.Random) -> None:
    bed.redis_link.stall("to_server")
    bed.redis_link.stall("to_client")
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    bed.redis_link.resume()
    bed.note_fault()


@contextmanager
def _configured(bed: Testbed, name: str, value: str, after: str) -> Iterator[None]:
    with contextlib.closing(bed.redis_server.client()) as client:
        client.config_set(name, value)
        try:
            yield
        finally:
            client.config_set(name, after)


@_fault("Redis out of memory", control="waiting for Redis", own_servers=True)
async def _redis_oom(bed: Testbed, draw: random.Random) -> None:
    with _configured(bed, "maxmemory", "1", "0"):
        await asyncio.sleep(draw.uniform(*PAUSE_S))
    bed.note_fault()


@_fault("Redis read-only", control="waiting for Redis", own_servers=True)
async def _redis_read_only(bed: Testbed, draw: random.Random) -> None:
    with contextlib.closing(bed.redis_server.client()) as client:
        client.replicaof("127.0.0.1", "1")
        await asyncio.sleep(draw.uniform(*PAUSE_S))
        client.replicaof("NO", "ONE")
    bed.note_fault()


@_fault("replica of Redis promoted", control="reconnecting to Redis", own_servers=True)
async def _promotion(bed: Testbed, draw: random.Random) -> None:
    """Replication is asynchronous: the last writes may be missing on the server that takes over."""
    bed.redis_forgets = bed.live_interrupted = True
    former = bed.redis_server
    replica = await asyncio.to_thread(_replica_of, former, bed.folder / "replica")
    bed.exit_stack.callback(former.start)
    bed.exit_stack.callback(replica.stop)
    await asyncio.sleep(draw.uniform(0.0, 0.5))
    await asyncio.to_thread(former.stop)
    with contextlib.closing(replica.client()) as client:
        client.replicaof("NO", "ONE")
    bed.redis_server = replica
    bed.auditor.redirect(replica.url)
    bed.redis_link.redirect(replica.port)
    bed.redis_link.cut()
    bed.note_fault()


def _replica_of(server: RedisServer, folder: Path) -> RedisServer:
    """Returns when it has all that the other one has."""
    folder.mkdir()
    replica = new_server(folder)
    replica.start()
    with contextlib.closing(replica.client()) as client:
        client.replicaof("127.0.0.1", str(server.port))
        while client.info("replication")["master_link_status"] != "up":  # type: ignore[index]
            time.sleep(0.01)
    return replica


@_fault("Kafka restarted", control="resent results", own_servers=True)
async def _kafka_restart(bed: Testbed, draw: random.Random) -> None:
    await asyncio.to_thread(bed.kafka.kill if draw.random() < 0.5 else bed.kafka.stop)
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    await asyncio.to_thread(bed.kafka.start)
    bed.note_fault()


@_fault("Kafka away longer than a session", control="resent results", own_servers=True)
async def _kafka_away(bed: Testbed, draw: random.Random) -> None:
    await asyncio.to_thread(bed.kafka.kill)
    await asyncio.sleep(SESSION_TIMEOUT_S + draw.uniform(*PAUSE_S))
    await asyncio.to_thread(bed.kafka.start)
    bed.note_fault()


@_fault("links to Kafka cut", control="reconnecting to Kafka", own_servers=True)
async def _cut_kafka(bed: Testbed, draw: random.Random) -> None:
    assert bed.kafka_link is not None
    for _ in range(draw.randint(1, 5)):
        bed.kafka_link.cut()
        bed.note_fault()
        await asyncio.sleep(draw.uniform(0.0, 0.3))


@_fault("requests to Kafka lost without an error", control="resent results", own_servers=True)
async def _kafka_one_way(bed: Testbed, draw: random.Random) -> None:
    await _lose(bed, "to_server", draw)


@_fault("replies of Kafka lost without an error", control="resent results", own_servers=True)
async def _kafka_half_open(bed: Testbed, draw: random.Random) -> None:
    await _lose(bed, "to_client", draw)


async def _lose(bed: Testbed, direction: Direction, draw: random.Random) -> None:
    assert bed.kafka_link is not None
    bed.kafka_link.stall(direction)
    await asyncio.sleep(draw.uniform(1.0, 3.0))
    bed.kafka_link.cut()
    bed.kafka_link.resume()
    bed.note_fault()


@_fault(
    "a record that kills its worker",
    control="attempts without progress",
    environ={"FAULTS_DIES_AT": KILLER},
)
async def _killer(bed: Testbed, draw: random.Random) -> None:
    """Workers are started again, as an orchestrator does, until the record is refused."""
    del draw
    bed.expected_status[KILLER] = "failed"
    await bed.publish([job(3000) | {"id": KILLER}])
    for round_ in range(MOST_RESTARTS):
        while all(worker.exit_code is None for worker in bed.workers.values()):
            if not await bed.auditor.wait_until_ended([KILLER], 0.05):
                return
        for name in [name for name, worker in bed.workers.items() if worker.exit_code is not None]:
            del bed.workers[name]
            await bed.forget_members(name)
            bed.start_worker(f"{name}-{round_}", FAULTS_DIES_AT=KILLER)
            bed.note_fault()


@_fault("partitions added", control="")
async def _partitions_added(bed: Testbed, draw: random.Random) -> None:
    topic = bed.environ["TAILRACE_JOBS_TOPIC"]
    admin = AIOKafkaAdminClient(bootstrap_servers=bed.kafka.bootstrap)
    await admin.start()
    try:
        await admin.create_partitions({topic: NewPartitions(total_count=PARTITIONS + 3)})
    finally:
        await admin.close()
    bed.note_fault()
    for partition in range(PARTITIONS, PARTITIONS + 3):
        await bed.publish([job(4000 + partition)], partition=partition)


@_fault("rebalance after rebalance", control="resume")
async def _rebalance_storm(bed: Testbed, draw: random.Random) -> None:
    bed.note_fault()
    for round_ in range(4):
        name = f"guest-{round_}"
        worker = bed.start_worker(name)
        await asyncio.sleep(draw.uniform(0.8, 2.0))
        bed.exit_codes[name] = await worker.terminate()


@_fault("jobs cancelled at every moment", control="cancellation before opening")
async def _cancels(bed: Testbed, draw: random.Random) -> None:
    early = [job(1000 + index) for index in range(6)]
    for body in early:
        await bed.cancel(body["id"])
        bed.expected_status[body["id"]] = "cancelled"
    await bed.publish(early)
    for job_id in draw.sample(sorted(bed.ledger.bodies), 12):
        await bed.cancel(job_id)
        await asyncio.sleep(draw.uniform(0.0, 0.1))


@_fault("the same records sent twice", control="suppressed duplicates")
async def _duplicates(bed: Testbed, draw: random.Random) -> None:
    again = [bed.ledger.bodies[job_id] for job_id in draw.sample(sorted(bed.ledger.bodies), 12)]
    await bed.publish(again)
    await bed.auditor.wait_until_ended([body["id"] for body in again], 60)
    await bed.publish(again)


POISON: list[bytes | None] = [
    None,
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b'{"id": 7}',
    json.dumps({"id": "x", "prompt": "x", "max_tokens": -1}).encode(),
    json.dumps({"id": "x", "prompt": "x" * 200_000}).encode(),
    json.dumps({"id": "x", "prompt": "x", "temprature": 1}).encode(),
    json.dumps({"id": "x", "prompt": "x", "response_format": {"type": "regex", "regex": "("}}).encode(),
]


@_fault("records that are no jobs", control="refusal of unreadable records")
async def _poison(bed: Testbed, draw: random.Random) -> None:
    for index, value in enumerate(draw.sample(POISON, len(POISON))):
        key = f"poison-{index}"
        await bed.publish_records([(key, {}, value and value.replace(b'"x"', f'"{key}"'.encode(), 1))])


@_fault("a worker's clock is three hours off", control="shared clock")
async def _clock(bed: Testbed, draw: random.Random) -> None:
    offset_s = draw.choice([-3, 3]) * 3600
    bed.start_worker("wrong-clock", FAULTS_CLOCK_OFFSET_S=str(offset_s))
    for worker in [each for name, each in bed.workers.items() if name != "wrong-clock"]:
        bed.exit_codes[worker.name] = await worker.terminate()
    bed.note_fault()
    far = [job(2000 + index, deadline=3600) for index in range(4)]
    past = [job(2100 + index, deadline=0.001) for index in range(4)]
    bed.expected_status |= {body["id"]: "completed" for body in far}
    bed.expected_status |= {body["id"]: "expired" for body in past}
    await bed.publish(far + past)
