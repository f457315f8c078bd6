"""Rebalances on a real broker: what is kept, what is lost, and what must not crash."""

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener

from service.ingest.assignments import Assignments
from service.ingest.kafka_clients import abandon_consumer, make_group_consumer, new_assignor
from tests.support.kafka import KafkaBroker
from tests.support.members import (
    LIMIT_S,
    IgnoresRebalances,
    Member,
    config_for,
    eventually,
    member,
    polled,
    publish,
)

pytestmark = pytest.mark.kafka


async def two_partitions_of_five(kafka: KafkaBroker, topic: str) -> None:
    for partition in (0, 1):
        await publish(kafka, topic, [b"%d-%d" % (partition, n) for n in range(5)], partition=partition)


async def share_with_a_second_member(kafka: KafkaBroker) -> tuple[Member, Member]:
    """The first member holds ten jobs of two partitions and completes one of each; then a second one
    joins."""
    config = config_for(kafka, await kafka.new_topic(partitions=2))
    await two_partitions_of_five(kafka, config.jobs_topic)
    async with member(config) as first:
        await first.received(10)
        first.complete([d for d in first.deliveries if d.offset == 2])
        async with member(config) as second:
            await second.received(4)
            await eventually(lambda: first.consumer.stats().assignments == 2, "the first member has rejoined")
            await eventually(lambda: not first.consumer._assignments.unrestored(), "it has restored")
            for worker in (first, second):
                worker.complete([d for records in worker.in_flight.values() for d in records.values()])
            await eventually(
                lambda: first.consumer.stats().incomplete + second.consumer.stats().incomplete == 0,
                "all complete",
            )
    return first, second


async def test_rebalance_keeps_work_in_flight_in_kept_partitions_and_moves_only_incomplete_jobs(
    kafka: KafkaBroker,
) -> None:
    first, second = await share_with_a_second_member(kafka)
    moved = {delivery.partition for delivery in second.deliveries}
    assert len(moved) == 1
    assert first.lost == [(first.deliveries[0].topic, moved.pop())]
    assert [delivery.offset for delivery in second.deliveries] == [0, 1, 3, 4]
    assert len(first.deliveries) == 10, "nothing was delivered to the first member again"
    assert first.consumer.stats().stale_completions == 0
    assert second.consumer.stats().commit_failures == 0


async def test_control_without_keeping_deliveries_are_lost_and_done_again(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assign = Assignments.assign

    def always_anew(self: Assignments, assigned: Any, generation: int) -> Any:
        self._generation = None
        return assign(self, assigned, generation)

    monkeypatch.setattr(Assignments, "assign", always_anew)
    first, _ = await share_with_a_second_member(kafka)
    assert len(first.lost) == 2
    await eventually(lambda: len(first.deliveries) >= 10, "deliveries")


async def test_hazard_pause_state_is_lost_at_a_rebalance_so_it_is_applied_again(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic(partitions=2))
    await two_partitions_of_five(kafka, config.jobs_topic)
    async with member(config, capacity=3) as first:
        await first.received(3)
        # What it loses to the second member must not give it credit again.
        first.capacity = 0
        await eventually(lambda: first.consumer.stats().paused, "paused")
        async with member(config, capacity=0) as second:
            await eventually(lambda: first.consumer.stats().assignments == 2, "rebalanced")
            await eventually(lambda: not first.consumer._assignments.unrestored(), "restored")
            await eventually(lambda: not second.consumer._assignments.unrestored(), "restored")
            for worker in (first, second):
                await polled(worker, 5)
                assert worker.kafka.paused() == worker.kafka.assignment() != set()
            assert len(first.deliveries) == 3
            assert second.deliveries == []


async def test_hazard_commit_that_races_a_rebalance_is_not_a_crash(kafka: KafkaBroker) -> None:
    """The broker refuses the commit (CommitFailed), the consumer joins again, and the commit follows."""
    config = config_for(kafka, await kafka.new_topic(), session_timeout_s=1.0)
    await publish(kafka, config.jobs_topic, [b"0", b"1"])
    async with member(config) as worker:
        await worker.received(2)
        await eventually(lambda: worker.consumer.stats().commits > 0, "a first commit")
        worker.kafka._coordinator.member_id = "somebody-else"
        worker.complete(worker.deliveries[1:])
        await eventually(lambda: worker.consumer.stats().commit_failures > 0, "the commit is refused")
        commits = worker.consumer.stats().commits
        await eventually(lambda: worker.consumer.stats().commits > commits, "committed after joining again")
        worker.complete(worker.deliveries[:1])
        await publish(kafka, config.jobs_topic, [b"2"])
        await worker.received(3)
        assert worker.values() == [b"0", b"1", b"2"], "no generation was missed, so nothing was done again"


async def test_hazard_member_evicted_for_silent_heartbeats_loses_its_deliveries_even_if_it_returns(
    kafka: KafkaBroker,
) -> None:
    """As if the event loop were blocked for longer than the session timeout."""
    config = config_for(kafka, await kafka.new_topic(), session_timeout_s=1.0)
    await publish(kafka, config.jobs_topic, [b"0", b"1"])
    silent = asyncio.Event()

    async def pretend() -> bool:
        silent.set()
        return True

    async with member(config) as evicted:
        await evicted.received(2)
        coordinator = evicted.kafka._coordinator
        coordinator._do_heartbeat = pretend
        await asyncio.wait_for(silent.wait(), 10)
        async with member(config) as heir:
            await heir.received(2)
            del coordinator._do_heartbeat
            await eventually(lambda: bool(evicted.lost), "the loss is reported")
            heir.complete(heir.deliveries)
            await eventually(lambda: heir.consumer.stats().incomplete == 0, "complete")
        stale = evicted.consumer.stats().stale_completions
        for delivery in evicted.deliveries[:2]:
            evicted.consumer.complete(delivery)
        assert evicted.consumer.stats().stale_completions == stale + 2


class _Blocks(ConsumerRebalanceListener):  # type: ignore[misc]
    """A member that heartbeats but does not rejoin: the others wait for it."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def on_partitions_revoked(self, revoked: Any) -> None:
        if revoked:
            self.entered.set()
            await self.release.wait()

    async def on_partitions_assigned(self, assigned: Any) -> None:
        pass


async def test_hazard_close_during_a_rebalance_that_does_not_end_is_bounded(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.ingest.consumer.LEAVE_TIMEOUT_S", 0.5)
    config = config_for(kafka, await kafka.new_topic(partitions=2), rebalance_timeout_s=60.0)
    await publish(kafka, config.jobs_topic, [b"0"])
    listener = _Blocks()
    other = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap,
        group_id=config.group_id,
        heartbeat_interval_ms=200,
        rebalance_timeout_ms=60_000,
        request_timeout_ms=70_000,
        enable_auto_commit=False,
        partition_assignment_strategy=(new_assignor(),),
    )
    other.subscribe([config.jobs_topic], listener=listener)
    await other.start()
    worker = Member(config)
    try:
        await asyncio.wait_for(listener.entered.wait(), 20)
        async with asyncio.timeout(10):
            await worker.close()
        assert worker.task.done()
    finally:
        listener.release.set()
        await other.stop()


async def test_abandoned_consumer_does_not_heartbeat_for_a_member_that_is_gone(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic(), session_timeout_s=1.0)
    await publish(kafka, config.jobs_topic, [b"0"])
    gone = make_group_consumer(config, new_assignor(), IgnoresRebalances())
    await gone.start()
    try:
        await asyncio.wait_for(gone.getone(), LIMIT_S)
    finally:
        await abandon_consumer(gone)
    async with member(config) as heir:
        await heir.received(1)
