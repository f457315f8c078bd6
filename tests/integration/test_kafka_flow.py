"""Fetching by credit on a real broker."""

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.consumer import fetcher

from service.ingest.kafka_clients import NO_PARTITION
from service.ingest.poller import Poller
from tests.support.kafka import KafkaBroker
from tests.support.members import Member, config_for, eventually, member, polled, publish

pytestmark = pytest.mark.kafka


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def drain_one_by_one(worker: Member, count: int) -> None:
    """Completes one record at a time, like a worker with long jobs."""
    while len(worker.deliveries) < count or worker.num_in_flight:
        await eventually(lambda: worker.num_in_flight > 0, "something to work on")
        for records in list(worker.in_flight.values()):
            worker.complete(list(records.values())[:1])


async def test_credit_bounds_what_is_fetched(kafka: KafkaBroker) -> None:
    topic = await kafka.new_topic(partitions=3)
    await publish(kafka, topic, numbers(60))
    async with member(config_for(kafka, topic), capacity=4) as worker:
        await drain_one_by_one(worker, 60)
        assert worker.most_in_flight <= 4
        assert sorted(worker.values()) == sorted(numbers(60))
        assert worker.consumer.stats().pauses > 0


async def test_control_without_credit_the_whole_backlog_is_fetched(kafka: KafkaBroker) -> None:
    topic = await kafka.new_topic()
    await publish(kafka, topic, numbers(60))
    async with member(config_for(kafka, topic), capacity=1_000_000) as worker:
        await worker.received(60)
        assert worker.most_in_flight > 4


async def test_wake_resumes_a_paused_consumer_before_its_poll_ends(kafka: KafkaBroker) -> None:
    topic = await kafka.new_topic()
    await publish(kafka, topic, numbers(3))
    async with member(config_for(kafka, topic, poll_timeout_s=60.0), capacity=1) as worker:
        await worker.received(1)
        worker.capacity = 10
        worker.consumer.wake()
        await worker.received(3)
        # A poll of 60 s is under way again, and close() does not wait for it.


async def fetches_while_draining(kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often records were fetched for one partition's 40 small records, pausing after each two."""
    count = 0

    class Counted(fetcher.PartitionRecords):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            nonlocal count
            count += 1
            super().__init__(*arguments)

    monkeypatch.setattr(fetcher, "PartitionRecords", Counted)
    topic = await kafka.new_topic()
    await publish(kafka, topic, numbers(40))
    async with member(config_for(kafka, topic), capacity=2) as worker:
        for number in range(2, 42, 2):
            await worker.received(number)
            await eventually(lambda: worker.consumer.stats().paused, "paused")
            await polled(worker, 2)
            worker.complete([d for records in worker.in_flight.values() for d in records.values()])
    return count


async def test_hazard_prefetched_records_of_a_paused_partition_are_not_fetched_again(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await fetches_while_draining(kafka, monkeypatch) <= 2


async def test_control_polling_paused_partitions_throws_their_records_away(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    getmany = AIOKafkaConsumer.getmany

    async def poll_all(self: Any, *partitions: Any, **options: Any) -> Any:
        return await getmany(self, *(() if partitions == (NO_PARTITION,) else partitions), **options)

    monkeypatch.setattr(AIOKafkaConsumer, "getmany", poll_all)
    assert await fetches_while_draining(kafka, monkeypatch) > 10


async def group_size(kafka: KafkaBroker, group: str) -> int:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        (response,) = await admin.describe_consumer_groups([group])
        return len(response.groups[0][-1])
    finally:
        await admin.close()


async def outlast_max_poll_interval(kafka: KafkaBroker, **changes: Any) -> tuple[int, int, int]:
    """Two members for one partition, one busy with a job and one idle, for three poll intervals.

    Returns the members left, how often the busy one was assigned, and how many partitions it lost.
    """
    topic = await kafka.new_topic()
    config = config_for(kafka, topic, max_poll_interval_s=0.8, **changes)
    await publish(kafka, topic, numbers(2))
    async with member(config, capacity=1) as first, member(config, capacity=1) as second:
        await eventually(lambda: first.num_in_flight + second.num_in_flight == 1, "one member is busy")
        busy = first if first.num_in_flight else second
        await eventually(lambda: first.task.done() or None not in (first.kafka, second.kafka), "both started")
        await eventually(
            lambda: min(m.consumer.stats().assignments for m in (first, second)) > 0, "both joined"
        )
        before = busy.consumer.stats().assignments
        # Nothing announces that time has passed, and passing time is what is tested.
        await asyncio.sleep(3 * config.max_poll_interval_s)
        stats = busy.consumer.stats()
        left = await group_size(kafka, config.group_id)
        busy.complete([d for records in busy.in_flight.values() for d in records.values()])
        if left == 2:
            await eventually(
                lambda: len(first.deliveries) + len(second.deliveries) == 2, "the next job is taken"
            )
        return left, stats.assignments - before, stats.lost_partitions


async def test_hazard_job_longer_than_max_poll_interval_and_member_without_partitions_stay_in_the_group(
    kafka: KafkaBroker,
) -> None:
    assert await outlast_max_poll_interval(kafka) == (2, 0, 0)


async def test_control_members_that_do_not_poll_are_evicted(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def do_not_poll(self: Poller, consumer: Any, fetchable: list[Any], credit: int) -> None:
        if fetchable and credit:
            await take(self, consumer, fetchable, credit)
        else:
            await asyncio.wait({asyncio.create_task(self.wake.wait())}, timeout=0.05)

    take = Poller._take
    monkeypatch.setattr(Poller, "_take", do_not_poll)
    left, _, _ = await outlast_max_poll_interval(kafka)
    assert left < 2


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_hazard_every_codec_is_read(kafka: KafkaBroker, codec: str) -> None:
    topic = await kafka.new_topic()
    values = [b"compressible " * 200 + number for number in numbers(20)]
    await publish(kafka, topic, values, compression_type=codec)
    async with member(config_for(kafka, topic)) as worker:
        await worker.received(20)
        assert worker.values() == values


async def test_hazard_record_of_10_mb_is_handed_over_and_the_next_one_too(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic(max_message_bytes=str(16 << 20)))
    large = b"x" * 10_000_000
    assert config.max_partition_fetch_bytes < len(large)
    await publish(kafka, config.jobs_topic, [b"before", large, b"after"], max_request_size=16 << 20)
    async with member(config) as worker:
        await worker.received(3)
        assert worker.values() == [b"before", large, b"after"]


async def test_a_busy_partition_does_not_starve_the_others(kafka: KafkaBroker) -> None:
    topic = await kafka.new_topic(partitions=2)
    await publish(kafka, topic, [b"bulk"] * 300, partition=0)
    await publish(kafka, topic, [b"other"] * 3, partition=1)
    async with member(config_for(kafka, topic), capacity=4) as worker:
        while worker.values().count(b"other") < 3:
            await eventually(lambda: worker.num_in_flight > 0, "something to work on")
            worker.complete([d for records in worker.in_flight.values() for d in records.values()])
        assert worker.values().count(b"bulk") < 100


async def test_a_stopped_consumer_takes_no_more_records_but_stays_and_commits(kafka: KafkaBroker) -> None:
    topic = await kafka.new_topic()
    await publish(kafka, topic, numbers(1))
    config = config_for(kafka, topic)
    async with member(config) as worker:
        await worker.received(1)
        await worker.consumer.stop()
        await publish(kafka, topic, numbers(5))
        await polled(worker, 5)
        assert len(worker.deliveries) == 1
        before = worker.consumer.stats().commits
        worker.complete(worker.deliveries)
        await eventually(lambda: worker.consumer.stats().commits > before, "the completion is committed")
    async with member(config) as heir:
        await heir.received(5)
        assert heir.values() == numbers(5), "what came after stop() was left to the next owner"


async def test_a_bug_in_a_callback_ends_the_consumer_instead_of_losing_the_record(kafka: KafkaBroker) -> None:
    from service.errors import InternalError

    topic = await kafka.new_topic()
    config = config_for(kafka, topic)
    await publish(kafka, topic, numbers(1))
    broken = Member(config)

    def bug(_: Any) -> None:
        raise KeyError("bug")

    broken.on_delivery = bug
    with pytest.raises(InternalError, match="bug"):
        await broken.task
    async with member(config) as heir:
        await heir.received(1)
