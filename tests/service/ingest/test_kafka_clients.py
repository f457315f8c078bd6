"""Every client of Kafka is built in one place, with options that are not aiokafka's defaults."""

import re
from pathlib import Path

from service.ingest.kafka_clients import (
    abandon_consumer,
    close_consumer,
    close_producer,
    make_group_consumer,
    make_producer,
    make_topic_reader,
    new_assignor,
)
from tests.support.configs import kafka_config
from tests.support.members import IgnoresRebalances

SERVICE = Path(__file__).resolve().parents[3] / "service"


def test_no_other_module_builds_a_client_of_aiokafka() -> None:
    made = re.compile(r"AIOKafka(Producer|Consumer|AdminClient)\(")
    makers = {path.name for path in SERVICE.rglob("*.py") if made.search(path.read_text())}
    assert makers == {"kafka_clients.py"}


async def test_hazard_acks_all_and_idempotence_are_not_aiokafkas_defaults() -> None:
    producer = make_producer(kafka_config())
    try:
        assert producer._sender._acks == -1
        assert producer._txn_manager is not None
    finally:
        await close_producer(producer)


async def test_records_are_uncompressed_unless_configured() -> None:
    default, chosen = make_producer(kafka_config()), make_producer(kafka_config(compression="gzip"))
    try:
        assert default._compression_type is None, "every client reads what is not compressed"
        assert chosen._compression_type == "gzip"
    finally:
        await close_producer(default)
        await close_producer(chosen)


async def test_hazard_join_is_timed_like_any_request_so_the_request_timeout_exceeds_the_rebalance() -> None:
    consumer = make_group_consumer(kafka_config(rebalance_timeout_s=120), new_assignor(), IgnoresRebalances())
    assert consumer._client._request_timeout_ms > 120_000
    await close_consumer(consumer)


async def test_a_reader_outside_a_group_can_be_abandoned_before_it_started() -> None:
    reader = make_topic_reader(kafka_config(), "results", start="latest")
    await abandon_consumer(reader)
    await close_consumer(reader)
