"""Faults of Kafka and of the links to it."""

import asyncio
import random

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from tests.faults.harness.fault import PAUSE_S, fault
from tests.faults.harness.jobs import job
from tests.faults.harness.testbed import PARTITIONS, SESSION_TIMEOUT_S, Testbed
from tests.support.proxy import Direction


@fault("Kafka restarted", control="resent results", own_servers=True)
async def _kafka_restart(bed: Testbed, draw: random.Random) -> None:
    await asyncio.to_thread(bed.kafka.kill if draw.random() < 0.5 else bed.kafka.stop)
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    await asyncio.to_thread(bed.kafka.start)
    bed.note_fault()


@fault("Kafka away longer than a session", control="resent results", own_servers=True)
async def _kafka_away(bed: Testbed, draw: random.Random) -> None:
    await asyncio.to_thread(bed.kafka.kill)
    await asyncio.sleep(SESSION_TIMEOUT_S + draw.uniform(*PAUSE_S))
    await asyncio.to_thread(bed.kafka.start)
    bed.note_fault()


@fault("links to Kafka cut", control="reconnecting to Kafka", own_servers=True)
async def _cut_kafka(bed: Testbed, draw: random.Random) -> None:
    assert bed.kafka_link is not None
    for _ in range(draw.randint(1, 5)):
        bed.kafka_link.cut()
        bed.note_fault()
        await asyncio.sleep(draw.uniform(0.0, 0.3))


@fault("requests to Kafka lost without an error", control="resent results", own_servers=True)
async def _kafka_one_way(bed: Testbed, draw: random.Random) -> None:
    await _lose(bed, "to_server", draw)


@fault("replies of Kafka lost without an error", control="resent results", own_servers=True)
async def _kafka_half_open(bed: Testbed, draw: random.Random) -> None:
    await _lose(bed, "to_client", draw)


async def _lose(bed: Testbed, direction: Direction, draw: random.Random) -> None:
    assert bed.kafka_link is not None
    bed.kafka_link.stall(direction)
    await asyncio.sleep(draw.uniform(1.0, 3.0))
    bed.kafka_link.cut()
    bed.kafka_link.resume()
    bed.note_fault()


@fault("partitions added", control="")
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
