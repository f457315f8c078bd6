"""Producers with transactions: aborted records never run, open ones wait, and waiting for them is no stall."""

import pytest
from aiokafka import AIOKafkaProducer

from tests.support.kafka import KafkaBroker
from tests.support.members import config_for, eventually, member, publish

pytestmark = pytest.mark.kafka


def transactional(kafka: KafkaBroker) -> AIOKafkaProducer:
    return AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=kafka.unique("transaction"))


async def test_only_committed_records_are_delivered_and_the_others_are_skipped(kafka: KafkaBroker) -> None:
    config = config_for(kafka, await kafka.new_topic(), stall_timeout_s=0.5)
    async with transactional(kafka) as first, transactional(kafka) as second:
        for value in (b"aborted 1", b"aborted 2"):
            await first.begin_transaction()
            await first.send_and_wait(config.jobs_topic, value, partition=0)
            await first.abort_transaction()
        await first.begin_transaction()
        await first.send_and_wait(config.jobs_topic, b"committed", partition=0)
        await first.commit_transaction()
        await second.begin_transaction()
        await second.send_and_wait(config.jobs_topic, b"open", partition=0)
        await publish(kafka, config.jobs_topic, [b"behind the open one"], partition=0)
        async with member(config) as worker:
            await worker.received(1)
            worker.complete(worker.deliveries)
            await worker.joined()
            checked = worker.consumer._poller._verified_s or 0.0
            await eventually(
                lambda: (worker.consumer._poller._verified_s or 0.0) > checked + 4 * config.stall_timeout_s,
                "checks of progress while the transaction is open",
            )
            assert worker.values() == [b"committed"]
            assert worker.consumer.stats().rebuilds == 0, "waiting for a transaction is no stall"
            assert worker.consumer.ready
            await second.commit_transaction()
            await worker.received(3)
            assert worker.values() == [b"committed", b"open", b"behind the open one"]
            worker.complete(worker.deliveries)
    async with member(config) as heir:
        await publish(kafka, config.jobs_topic, [b"last"])
        await heir.received(1)
        assert heir.values() == [b"last"], "markers and aborted records hold no commit back"
