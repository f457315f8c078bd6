"""Members join, leave, stall and break while jobs run: no job is lost, and only complete offsets are committed."""

import asyncio
import random
from typing import Any

import pytest

from service.ingest import Delivery
from tests.support.kafka import KafkaBroker
from tests.support.members import Member, config_for, eventually, member, publish

pytestmark = pytest.mark.kafka

NUM_JOBS = 400
NUM_DISRUPTIONS = 10


class Storm:
    """Two to four members; one disruption follows the other as soon as a few more jobs are complete."""

    def __init__(self, kafka: KafkaBroker, topic: str, seed: int) -> None:
        self.config = config_for(kafka, topic, session_timeout_s=1.5, rebalance_timeout_s=3.0)
        self.random = random.Random(seed)
        self.members: list[Member] = []
        self.times_done: dict[bytes, int] = {}
        self.work: set[asyncio.Task[None]] = set()

    def join(self) -> None:
        one = Member(self.config, capacity=self.random.choice([2, 8, 50]))

        def begin(delivery: Delivery) -> None:
            self.work.add(task := asyncio.create_task(self.run_job(one, delivery)))
            task.add_done_callback(self.work.discard)

        one.on_delivery = begin
        self.members.append(one)

    async def run_job(self, one: Member, delivery: Delivery) -> None:
        # A job's length, not a wait for something.
        await asyncio.sleep(self.random.expovariate(40))
        held = one.in_flight.get((delivery.topic, delivery.partition), {})
        if held.get(delivery.offset) is delivery:
            value = delivery.value or b""
            self.times_done[value] = self.times_done.get(value, 0) + 1
            one.complete([delivery])

    async def disrupt(self) -> None:
        kind = self.random.choice(["join", "close", "dead fetcher", "evict"])
        if kind == "join" and len(self.members) < 4:
            self.join()
        elif kind == "close" and len(self.members) > 1:
            one = self.members.pop(self.random.randrange(len(self.members)))
            await one.close()
            one.in_flight.clear()
        elif kind == "dead fetcher":
            fetcher = self.pick()._fetcher
            for task in (fetcher._fetch_task, *fetcher._pending_tasks):
                task.cancel()
        else:
            self.pick()._coordinator.member_id = "somebody-else"

    def pick(self) -> Any:
        one = self.random.choice([m for m in self.members if m.consumer.ready] or self.members)
        return one.kafka


async def test_no_job_is_lost_in_a_storm_of_rebalances(kafka: KafkaBroker) -> None:
    storm = Storm(kafka, await kafka.new_topic(partitions=4), seed=7)
    storm.join()
    storm.join()
    await asyncio.gather(*(m.joined() for m in storm.members))
    for number in range(NUM_DISRUPTIONS):
        batch = [b"%d" % job for job in range(number, NUM_JOBS, NUM_DISRUPTIONS)]
        await publish(kafka, storm.config.jobs_topic, batch)
        goal = min(NUM_JOBS, len(storm.times_done) + 10)
        await eventually(lambda g=goal: len(storm.times_done) >= g, "ten more jobs done")  # type: ignore[misc]
        await eventually(lambda: any(m.consumer.ready for m in storm.members), "somebody is ready")
        await storm.disrupt()
    await eventually(lambda: len(storm.times_done) == NUM_JOBS, "every job done", limit_s=60)
    for one in storm.members:
        await one.close()
        assert one.task.exception() is None
    async with member(storm.config) as heir:
        await publish(kafka, storm.config.jobs_topic, [b"last"])
        await heir.received(1)
        assert heir.values() == [b"last"], "all before was committed"
