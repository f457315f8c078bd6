"""A broker that is away and returns, and a client that broke silently."""

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from structlog.testing import capture_logs

from service.errors import DependencyError, JobError
from service.ingest import Delivery, KafkaConfig, ResultProducer, ensure_topics
from service.ingest.producer import WithdrawnError
from tests.support.kafka import KafkaBroker
from tests.support.members import Member, config_for, eventually, member, publish, running_producer

pytestmark = pytest.mark.kafka


@pytest.fixture
def outage(kafka: KafkaBroker) -> Iterator[KafkaBroker]:
    """A broker that the test may stop; it runs again afterwards."""
    yield kafka
    kafka.start()


async def read_all(config: KafkaConfig, count: int) -> list[Any]:
    consumer = AIOKafkaConsumer(
        config.results_topic, bootstrap_servers=config.kafka_bootstrap, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        records: list[Any] = []
        async with asyncio.timeout(20):
            while len({record.key for record in records}) < count:
                for batch in (await consumer.getmany(timeout_ms=200)).values():
                    records += batch
        return records
    finally:
        await consumer.stop()


async def test_broker_restart_in_the_middle_of_a_stream_loses_nothing(outage: KafkaBroker) -> None:
    kafka = outage
    config = config_for(kafka, await kafka.new_topic(partitions=2), results_topic=await kafka.new_topic())
    count = 200
    await publish(kafka, config.jobs_topic, [b"%d" % n for n in range(count)])
    producer = running_producer(config)
    finishing: set[asyncio.Task[None]] = set()
    half = asyncio.Event()

    async with member(config, capacity=8) as worker:

        async def finish(delivery: Delivery) -> None:
            await producer.send(config.results_topic, delivery.value, delivery.value)
            worker.complete([delivery])
            worker.consumer.wake()

        def begin(delivery: Delivery) -> None:
            finishing.add(task := asyncio.create_task(finish(delivery)))
            task.add_done_callback(finishing.discard)
            if len(worker.deliveries) >= count // 2:
                half.set()

        worker.on_delivery = begin
        await asyncio.wait_for(half.wait(), 20)
        await asyncio.to_thread(kafka.kill)
        await eventually(lambda: not worker.consumer.ready, "readiness tells that nothing moves")
        await asyncio.to_thread(kafka.start)
        records = await read_all(config, count)
        await eventually(
            lambda: worker.consumer.stats().incomplete == 0 and worker.consumer.ready, "all complete"
        )
    assert {record.value for record in records} == {b"%d" % n for n in range(count)}
    assert {delivery.value for delivery in worker.deliveries} == {b"%d" % n for n in range(count)}
    await producer.stop()
    async with member(config) as heir:
        await publish(kafka, config.jobs_topic, [b"last"])
        await heir.received(1)
        assert heir.values() == [b"last"], "everything before was committed"


async def test_broker_away_at_start_is_one_clear_line_and_not_ready_then_all_works(
    outage: KafkaBroker,
) -> None:
    kafka = outage
    topic, results = await kafka.new_topic(), await kafka.new_topic()
    await publish(kafka, topic, [b"0"])
    config = config_for(kafka, topic, results_topic=results)
    await asyncio.to_thread(kafka.stop)
    with capture_logs() as lines:
        worker = Member(config)
        producer = running_producer(config)
        sending = asyncio.create_task(producer.send(results, b"key", b"value"))
        stopped_early = running_producer(config)
        given_up = asyncio.create_task(stopped_early.send(results, b"key", b"value"))
        await eventually(lambda: sum(line["event"] == "kafka_unavailable" for line in lines) >= 4, "lines")
        assert not worker.consumer.ready
        assert not producer.ready
        started_s = time.monotonic()
        await stopped_early.stop(timeout_s=0.1)
        with pytest.raises(DependencyError, match="before Kafka acknowledged"):
            await given_up
        assert time.monotonic() - started_s < 10, "stopping is bounded while the broker is away"
    assert all(
        line["log_level"] == "warning" and config.kafka_bootstrap == line["bootstrap"] for line in lines[:4]
    )
    await asyncio.to_thread(kafka.start)
    await worker.received(1)
    await worker.joined()
    await asyncio.wait_for(sending, 20)
    await worker.close()
    await producer.stop()


async def break_fetching(kafka: KafkaBroker, **changes: Any) -> tuple[Member, int]:
    """Ends the fetch task of a consumer without an error, then publishes; returns the records that arrived in time."""
    config = config_for(kafka, await kafka.new_topic(), **changes)
    await publish(kafka, config.jobs_topic, [b"0"])
    async with member(config) as worker:
        await worker.received(1)
        worker.complete(worker.deliveries)
        await worker.joined()
        for task in (worker.kafka._fetcher._fetch_task, *worker.kafka._fetcher._pending_tasks):
            task.cancel()
        await publish(kafka, config.jobs_topic, [b"1"])
        checked = worker.consumer._poller._verified_s
        await eventually(
            lambda: (
                len(worker.deliveries) == 2
                or (worker.consumer._poller._verified_s or 0) > (checked or 0) + 5 * config.check_interval_s
            ),
            "a delivery, or many checks",
        )
        return worker, len(worker.deliveries)


async def test_hazard_fetch_task_that_ends_silently_is_found_and_rebuilt(kafka: KafkaBroker) -> None:
    worker, deliveries = await break_fetching(kafka, stall_timeout_s=0.4)
    assert deliveries == 2
    assert worker.consumer.stats().rebuilds == 1


async def test_control_without_the_watchdog_a_dead_fetcher_stays_dead(kafka: KafkaBroker) -> None:
    worker, deliveries = await break_fetching(kafka, stall_timeout_s=1e9)
    assert deliveries == 1
    assert worker.consumer.stats().lag == 1


async def never_ready(*_: Any, **__: Any) -> bool:
    return False


@pytest.mark.parametrize("how", ["closed", "sender task gone", "node not ready"])
async def test_hazard_broken_producer_is_rebuilt_and_the_record_sent_again(
    kafka: KafkaBroker, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(kafka, "unused", results_topic=await kafka.new_topic(), ack_timeout_s=0.5)
    producer = running_producer(config)
    await producer.send(config.results_topic, b"a", b"1")
    inner = producer._supervisor._producer
    assert inner is not None
    if how == "closed":
        await inner.stop()
    elif how == "sender task gone":
        inner._sender.sender_task.cancel()
    else:
        monkeypatch.setattr(inner.client, "ready", never_ready)
    await asyncio.gather(
        *(producer.send(config.results_topic, b"%d" % n, b"2", [("h", b"x")]) for n in range(20))
    )
    assert producer.stats().rebuilds == 1, "once, for all that failed"
    records = await read_all(config, 21)
    assert {record.key for record in records} == {b"a"} | {b"%d" % n for n in range(20)}
    assert records[-1].headers == (("h", b"x"),)
    await producer.stop()


async def test_sends_in_flight_are_bounded(kafka: KafkaBroker) -> None:
    config = config_for(kafka, "unused", results_topic=await kafka.new_topic(), max_in_flight_sends=3)
    producer = ResultProducer(config)
    most = 0

    async def send(number: int) -> None:
        nonlocal most
        await producer.send(config.results_topic, b"%d" % number, b"value")
        most = max(most, producer.stats().in_flight + 1)

    sends = [asyncio.create_task(send(number)) for number in range(30)]
    running = asyncio.create_task(producer.run())
    await asyncio.gather(*sends)
    assert most == 3
    await producer.stop()
    await running


async def test_a_record_too_large_for_the_topic_names_the_limit_and_affects_no_other(
    kafka: KafkaBroker,
) -> None:
    config = config_for(kafka, "unused", results_topic=await kafka.new_topic(max_message_bytes="100000"))
    producer = running_producer(config)
    for too_large in (os.urandom(200_000), bytes(config.max_message_bytes + 1)):
        with pytest.raises(
            JobError, match=f"{len(too_large) + 1} bytes.*{config.max_message_bytes}"
        ) as caught:
            await producer.send(config.results_topic, b"k", too_large)
        assert caught.value.field == "value"
    await producer.send(config.results_topic, b"k", b"small")
    assert producer.stats().rebuilds == 0
    await producer.stop()


async def test_a_record_that_the_broker_keeps_refusing_ends_the_producer_with_the_reason(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.ingest.producer.MAX_REFUSALS", 3)
    config = config_for(kafka, "unused", results_topic=await kafka.new_topic(cleanup_policy="compact"))
    producer = ResultProducer(config)
    running = asyncio.create_task(producer.run())
    sending = asyncio.create_task(producer.send(config.results_topic, None, b"no key"))
    await eventually(lambda: producer.problem is not None, "the reason is told")
    assert producer.problem is not None
    assert config.results_topic in producer.problem
    assert not producer.ready
    for task in (sending, running):
        with pytest.raises(DependencyError, match="3 times in a row; this worker gives its partitions up"):
            await asyncio.wait_for(task, 20)
    await producer.stop()


async def test_an_optional_record_that_its_topic_refuses_affects_no_other(
    kafka: KafkaBroker,
) -> None:
    topic = await kafka.new_topic(cleanup_policy="compact")
    config = config_for(kafka, "unused", dead_letter_topic=topic, results_topic=topic)
    producer = running_producer(config)
    keys = [b"a", None, b"b"]
    outcomes = await asyncio.gather(
        *(producer.send(topic, key, b"value", optional=True) for key in keys), return_exceptions=True
    )
    assert [getattr(outcome, "code", None) for outcome in outcomes] == [None, "record_refused", None]
    assert {record.key for record in await read_all(config, 2)} == {b"a", b"b"}
    await producer.stop()


async def test_a_record_no_longer_wanted_is_withdrawn_while_the_broker_is_away(
    outage: KafkaBroker,
) -> None:
    kafka = outage
    config = config_for(kafka, "unused", results_topic=await kafka.new_topic())
    producer = running_producer(config)
    await producer.send(config.results_topic, b"wanted", b"1")
    await asyncio.to_thread(kafka.kill)
    wanted = True
    sending = asyncio.create_task(producer.send(config.results_topic, b"late", b"2", wanted=lambda: wanted))
    await eventually(lambda: not producer.ready, "the connection is known to be lost")
    wanted = False
    await asyncio.to_thread(kafka.start)
    with pytest.raises(WithdrawnError):
        await asyncio.wait_for(sending, 30)
    await producer.send(config.results_topic, b"next", b"3")
    assert {record.key for record in await read_all(config, 2)} == {b"wanted", b"next"}
    await producer.stop()


async def test_missing_topics_are_created_with_their_policies(kafka: KafkaBroker) -> None:
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

    names = [kafka.unique(word) for word in ("jobs", "results", "dead")]
    config = config_for(kafka, names[0], results_topic=names[1], dead_letter_topic=names[2], partitions=3)
    assert await ensure_topics(config) == tuple(names)
    assert await ensure_topics(config) == ()
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        described = {topic["topic"]: topic for topic in await admin.describe_topics(names)}
        assert {len(described[name]["partitions"]) for name in names} == {3}
        (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, names[1])])
        settings = {entry[0]: entry[1] for entry in response.resources[0][-1]}
        assert settings["cleanup.policy"] == "compact,delete"
        assert settings["message.timestamp.type"] == "LogAppendTime"
        assert settings["max.message.bytes"] == str(config.max_message_bytes)
    finally:
        await admin.close()


async def test_broker_that_refuses_topics_is_reported_and_tolerated(kafka: KafkaBroker) -> None:
    names = [kafka.unique(word) for word in ("jobs", "results", "dead")]
    config = config_for(
        kafka, names[0], results_topic=names[1], dead_letter_topic=names[2], replication_factor=3
    )
    with capture_logs() as lines:
        assert await ensure_topics(config) == ()
    assert [line["topic"] for line in lines if line["event"] == "kafka_topic_refused"] == names
