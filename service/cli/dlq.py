"""`tailrace dlq list` and `tailrace dlq replay`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import typer
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from service.cli.console import note, print_json, print_table, run
from service.client import client_settings
from service.connect import kafka_config
from service.errors import DependencyError, InternalError, SettingsError
from service.ingest.kafka_clients import (
    close_consumer,
    close_producer,
    make_producer,
    make_topic_reader,
    start_client,
)
from service.ingest.kafka_config import KafkaConfig
from service.settings import Settings
from service.wire import DeadLetter, parse_dead_letter

POLL_MS = 500

Place = tuple[int, int]
"""(partition, offset) on the dead-letter topic."""


def list_letters(*, limit: int, as_json: bool) -> None:
    """Print up to `limit` dead letters. Raises DependencyError when Kafka does not answer."""
    rows = run(_list(client_settings(), limit))
    if as_json:
        print_json({"dead_letters": rows})
        return
    columns = ("place", "code", "message", "from", "attempt", "key", "bytes")
    print_table(columns, [tuple(row[column] for column in columns) for row in rows])


async def _list(settings: Settings, limit: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async for (partition, offset), letter in _read(kafka_config(settings)):
        origin = letter.origin
        rows.append(
            {
                "place": f"{partition}:{offset}",
                "code": origin.code,
                "message": origin.message,
                "from": f"{origin.topic}/{origin.partition}/{origin.offset}",
                "attempt": origin.attempt,
                "key": (letter.key or b"").decode(errors="replace"),
                "bytes": len(letter.value or b""),
                "timestamp_ms": origin.timestamp_ms,
            }
        )
        if len(rows) >= limit:
            break
    return rows


def replay(places: list[str], *, everything: bool) -> None:
    """Publish dead letters again; exit code 1 when one is missing. Raises SettingsError and DependencyError."""
    if bool(places) == everything:
        raise SettingsError("name dead letters as PARTITION:OFFSET, or say --all")
    wanted = None if everything else {_place(text) for text in places}
    missing = run(_replay(client_settings(), wanted))
    for partition, offset in sorted(missing):
        note(f"no dead letter at {partition}:{offset}")
    if missing:
        raise typer.Exit(1)


async def _replay(settings: Settings, wanted: set[Place] | None) -> set[Place]:
    """Publish dead letters again and return the places that held none. The letters themselves stay."""
    config = kafka_config(settings)
    missing = set(wanted or ())
    num_replayed = 0
    producer = make_producer(config)
    try:
        async with _reaching(config):
            await start_client(producer)
        async for place, letter in _read(config):
            if wanted is not None and place not in wanted:
                continue
            key, value, headers = letter.replay()
            await producer.send_and_wait(settings.jobs_topic, value, key=key, headers=headers)
            missing.discard(place)
            num_replayed += 1
    finally:
        await close_producer(producer)
    print(f"{num_replayed} dead letters published again on {settings.jobs_topic}")
    return missing


async def _read(config: KafkaConfig) -> AsyncIterator[tuple[Place, DeadLetter]]:
    """Yield all dead letters that are on the topic now, partition by partition."""
    consumer = make_topic_reader(config, config.dead_letter_topic, start="earliest")
    try:
        async with _reaching(config):
            await start_client(consumer)
        ends = await consumer.end_offsets(list(consumer.assignment()))
        for partition in sorted(ends, key=lambda each: int(each.partition)):
            async for item in _read_partition(consumer, partition, ends[partition]):
                yield item
    finally:
        await close_consumer(consumer)


async def _read_partition(
    consumer: AIOKafkaConsumer, partition: TopicPartition, end: int
) -> AsyncIterator[tuple[Place, DeadLetter]]:
    while await consumer.position(partition) < end:
        batches = await consumer.getmany(partition, timeout_ms=POLL_MS)
        for record in batches.get(partition, []):
            place = (record.partition, record.offset)
            try:
                yield place, parse_dead_letter(record.key, record.value, record.headers)
            except InternalError as error:
                note(f"{place[0]}:{place[1]} is not a dead letter of ours: {error}")


@asynccontextmanager
async def _reaching(config: KafkaConfig) -> AsyncIterator[None]:
    """Turn the errors of a broker that cannot be reached into DependencyError."""
    try:
        yield
    except (KafkaError, OSError) as error:
        raise DependencyError(f"Kafka at {config.kafka_bootstrap} does not answer: {error}") from error


def _place(text: str) -> Place:
    partition, _, offset = text.partition(":")
    if not (partition.isdecimal() and offset.isdecimal()):
        raise SettingsError(f"{text!r} is not PARTITION:OFFSET, such as 0:17")
    return int(partition), int(offset)
