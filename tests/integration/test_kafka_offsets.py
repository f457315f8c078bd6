"""Commits on a real broker, the map in their metadata, and how the next owner uses them."""

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient

from service.ingest import KafkaConfig
from service.ingest.commits import Committed, fetch_committed
from service.ingest.offsets import MAX_METADATA_BYTES
from tests.support.kafka import KafkaBroker
from tests.support.members import Member, config_for, eventually, member, polled, publish

pytestmark = pytest.mark.kafka


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def committed(config: KafkaConfig, partition: int = 0) -> Committed:
    key = (config.jobs_topic, partition)
    return (await fetch_committed(config, [key]))[key]


async def committed_when(config: KafkaConfig, condition: Callable[[Committed], bool]) -> Committed:
    """Waits until the group has committed the expected offsets and returns them."""
    async with asyncio.timeout(20):
        while True:
            found = await committed(config)
            if condition(found):
                return found
            await asyncio.sleep(0.02)


async def committed_is(config: KafkaConfig, offset: int, completed: tuple[tuple[int, int], ...] = ()) -> None:
    await committed_when(config, lambda found: (found.offset, found.completed) == (offset, completed))


async def test_map_round_trip_the_next_owner_gets_only_incomplete_jobs(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic())
    await publish(kafka, config.jobs_topic, numbers(10))
    async with member(config) as first:
        await first.received(10)
        first.complete(first.deliveries[offset] for offset in (0, 3, 4, 5, 8))
        await committed_is(config, 1, ((3, 6), (8, 9)))
    async with member(config, capacity=1) as second:
        for number in range(1, 6):
            # One at a time, so that a poll also begins in the middle of what the map lists.
            await second.received(number)
            second.complete(second.deliveries[-1:])
        assert second.values() == [b"1", b"2", b"6", b"7", b"9"]
        assert second.lost == []
        await committed_is(config, 10)


async def test_control_without_the_map_complete_jobs_run_again(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.ingest.commits.decode_completed", lambda offset, metadata: None)
    config = config_for(kafka, await kafka.new_topic())
    await publish(kafka, config.jobs_topic, numbers(4))
    async with member(config) as first:
        await first.received(4)
        first.complete(first.deliveries[2:])
    async with member(config) as second:
        await second.received(4)


async def test_hazard_loss_on_close_work_completed_just_before_is_committed(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic(), commit_interval_s=3600.0)
    await publish(kafka, config.jobs_topic, numbers(3))
    async with member(config) as first:
        await first.received(3)
        await eventually(lambda: first.consumer.stats().commits > 0, "the first commit, so that none is due")
        first.complete(first.deliveries)
    await committed_is(config, 3)


async def run_and_kill(kafka: KafkaBroker, config: KafkaConfig, *flags: str) -> list[str]:
    """Starts a member in its own process, waits until its completions are committed, and kills it."""
    arguments = [config.kafka_bootstrap, config.jobs_topic, config.group_id, *flags]
    command = [sys.executable, "-m", "tests.integration.kafka_member", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    assert process.stdout is not None
    try:
        got = [(await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip() for _ in range(6)]
        if flags:
            await committed_is(config, 6)
        else:
            await committed_is(config, 1, ((2, 4), (5, 6)))
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    return got


JOBS = [b"done-0", b"hold-1", b"done-2", b"done-3", b"hold-4", b"done-5"]


async def test_killed_member_leaves_exactly_its_incomplete_jobs_to_the_others(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic())
    await publish(kafka, config.jobs_topic, JOBS)
    assert await run_and_kill(kafka, config) == [job.decode() for job in JOBS]
    async with member(config) as heir:
        await publish(kafka, config.jobs_topic, [b"next"])
        await heir.received(3)
        assert heir.values() == [b"hold-1", b"hold-4", b"next"]


async def test_control_a_naive_tracker_loses_the_jobs_of_a_killed_member(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic())
    await publish(kafka, config.jobs_topic, JOBS)
    await run_and_kill(kafka, config, "naive")
    async with member(config) as heir:
        await publish(kafka, config.jobs_topic, [b"next"])
        await heir.received(1)
        assert heir.values() == [b"next"]


async def test_hazard_transaction_markers_do_not_hold_the_commit_back(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic())
    producer = AIOKafkaProducer(
        bootstrap_servers=kafka.bootstrap, transactional_id=kafka.unique("transaction")
    )
    await producer.start()
    for number in numbers(3):
        async with producer.transaction():
            await producer.send(config.jobs_topic, number, partition=0)
    await producer.stop()
    async with member(config) as worker:
        await worker.received(3)
        assert [delivery.offset for delivery in worker.deliveries] == [0, 2, 4]
        worker.complete(worker.deliveries[1:])
        await committed_is(config, 0, ((1, 6),))
        worker.complete(worker.deliveries[:1])
        await committed_is(config, 6)


async def test_hazard_a_map_that_is_too_large_pauses_fetching_and_loses_nothing(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic())
    count = 4_000
    await publish(kafka, config.jobs_topic, numbers(count), linger_ms=5)
    async with member(config, capacity=1_000_000) as worker:
        await worker.received(1)
        held = await stable_count(worker)
        assert held < count, "with everything in flight the map could outgrow its limit"
        worker.complete(delivery for delivery in worker.deliveries[1:held:2])
        found = await committed_when(config, lambda found: len(found.completed) >= held // 2 - 1)
        assert MAX_METADATA_BYTES // 2 < len(found.metadata) <= MAX_METADATA_BYTES
        worker.on_delivery = lambda delivery: worker.complete([delivery])
        worker.complete([d for records in worker.in_flight.values() for d in records.values()])
        await worker.received(count)
        assert worker.values() == numbers(count)
        await committed_is(config, count)


async def stable_count(worker: Member) -> int:
    """Deliveries once five polls in a row brought none."""
    while True:
        before = len(worker.deliveries)
        await polled(worker, 5)
        if len(worker.deliveries) == before:
            return before


async def test_hazard_metadata_of_other_programs_is_ignored(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic())
    await publish(kafka, config.jobs_topic, numbers(3))
    other = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap, group_id=config.group_id, enable_auto_commit=False
    )
    await other.start()
    partition = KafkaPartition(config.jobs_topic, 0)
    other.assign([partition])
    await other.commit({partition: (1, "tailrace1:who knows \N{SNOWMAN}")})
    await other.stop()
    async with member(config) as worker:
        await worker.received(2)
        assert worker.values() == [b"1", b"2"]


async def test_committed_offset_that_retention_removed_starts_at_the_beginning(kafka: KafkaBroker) -> None:
    from aiokafka.admin.records_to_delete import RecordsToDelete

    config = config_for(kafka, await kafka.new_topic())
    await publish(kafka, config.jobs_topic, numbers(6))
    async with member(config) as first:
        await first.received(6)
        first.complete(first.deliveries[:1] + first.deliveries[4:5])
        await committed_is(config, 1, ((4, 5),))
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    await admin.delete_records({KafkaPartition(config.jobs_topic, 0): RecordsToDelete(3)})
    await admin.close()
    async with member(config) as second:
        await second.received(2)
        assert second.values() == [b"3", b"5"]


async def test_a_topic_recreated_under_a_running_consumer_is_read_from_its_beginning(
    kafka: KafkaBroker,
) -> None:
    config = config_for(kafka, await kafka.new_topic())
    await publish(kafka, config.jobs_topic, numbers(5))
    async with member(config) as worker:
        await worker.received(5)
        worker.complete(worker.deliveries[:3])
        await committed_is(config, 3)
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        await admin.start()
        await admin.delete_topics([config.jobs_topic])
        await admin.close()
        await kafka.new_topic(name=config.jobs_topic)
        await publish(kafka, config.jobs_topic, [b"new-0", b"new-1"])
        await worker.received(7)
        assert worker.values()[5:] == [b"new-0", b"new-1"]
        assert (config.jobs_topic, 0) in worker.lost
        worker.complete(worker.deliveries[:5])
        worker.complete(worker.deliveries[5:])
        await committed_is(config, 2)


async def test_hazard_a_completion_during_a_commit_is_committed_by_the_next(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(kafka, await kafka.new_topic())
    await publish(kafka, config.jobs_topic, numbers(2))
    async with member(config) as worker:
        await worker.received(2)
        commit = AIOKafkaConsumer.commit
        late = [worker.deliveries[1]]

        async def complete_meanwhile(self: Any, offsets: Any) -> None:
            await commit(self, offsets)
            worker.complete(late)
            late.clear()

        monkeypatch.setattr(AIOKafkaConsumer, "commit", complete_meanwhile)
        worker.complete(worker.deliveries[:1])
        await committed_is(config, 2)
        assert not late


async def test_hazard_missing_answer_is_not_taken_for_nothing_committed(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the coordinator loads, aiokafka's admin client returns an empty answer and no error."""
    config = config_for(kafka, await kafka.new_topic())
    await publish(kafka, config.jobs_topic, numbers(3))
    async with member(config) as first:
        await first.received(3)
        first.complete(first.deliveries[:2])
    ask = AIOKafkaAdminClient.list_consumer_group_offsets
    empty = 2

    async def loading(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal empty
        empty -= 1
        return {} if empty >= 0 else await ask(self, *arguments, **options)

    monkeypatch.setattr(AIOKafkaAdminClient, "list_consumer_group_offsets", loading)
    async with member(config) as second:
        await second.received(1)
        assert second.values() == [b"2"]
        assert empty < 0
