"""A start that is cancelled leaves no connection behind."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import aiokafka.client
import pytest
from aiokafka.conn import AIOKafkaConnection

from service.ingest import KafkaConfig, kafka_clients
from service.ingest.kafka_clients import (
    admin_client,
    close_consumer,
    close_producer,
    make_group_consumer,
    make_producer,
    make_topic_reader,
    new_assignor,
    start_client,
)
from tests.support.kafka import KafkaBroker
from tests.support.members import IgnoresRebalances, config_for

pytestmark = pytest.mark.kafka

MANY_REQUESTS = 50
SEND = AIOKafkaConnection.send


async def start_and_close(make: Callable[[], Any], close: Callable[[Any], Awaitable[None]]) -> None:
    client = make()
    try:
        await start_client(client)
    finally:
        await close(client)


async def use_admin(config: KafkaConfig) -> None:
    async with admin_client(config):
        pass


STARTS: dict[str, Callable[[KafkaConfig], Awaitable[None]]] = {
    "producer": lambda config: start_and_close(lambda: make_producer(config), close_producer),
    "member of a group": lambda config: start_and_close(
        lambda: make_group_consumer(config, new_assignor(), IgnoresRebalances()), close_consumer
    ),
    "reader": lambda config: start_and_close(
        lambda: make_topic_reader(config, config.jobs_topic, start="earliest"), close_consumer
    ),
    "admin client": use_admin,
}


class _CancelsAtRequest:
    """Takes the place of `AIOKafkaConnection.send`, and cancels a task as it sends its n-th request, counted from 0."""

    def __init__(self, start: Awaitable[None], n: int) -> None:
        self.task = asyncio.ensure_future(start)
        self.connections: list[AIOKafkaConnection] = []
        """Of each request, in order."""
        self._n = n

    def send(self, connection: AIOKafkaConnection, *args: Any, **kwargs: Any) -> Any:
        self.connections.append(connection)
        if len(self.connections) == self._n + 1:
            self.task.cancel()
        return SEND(connection, *args, **kwargs)

    def close_open_ones(self) -> int:
        """Returns how many there were."""
        still_open = {each for each in self.connections if each.connected()}
        for connection in still_open:
            connection.close()
        return len(still_open)


async def cancelled_at_each_request(
    start: Callable[[KafkaConfig], Awaitable[None]], config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Starts and closes a client again and again, cancelled at the first request, then at the second, and so on.

    Returns how often it was cancelled until it ended by itself, and how many connections stayed open.
    """
    num_open = 0
    for n in range(MANY_REQUESTS):
        cancelling = _CancelsAtRequest(start(config), n)
        with monkeypatch.context() as patch:
            patch.setattr(AIOKafkaConnection, "send", lambda *args, to=cancelling, **kw: to.send(*args, **kw))
            (ended,) = await asyncio.gather(cancelling.task, return_exceptions=True)
        num_open += cancelling.close_open_ones()
        if ended is None:
            return n, num_open
        assert isinstance(ended, asyncio.CancelledError)
    raise AssertionError("it never started")


@pytest.mark.parametrize("client", STARTS)
async def test_a_start_cancelled_at_any_request_leaves_no_connection_open(
    kafka: KafkaBroker, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(kafka, await kafka.new_topic())
    num_cancelled, num_open = await cancelled_at_each_request(STARTS[client], config, monkeypatch)
    assert num_cancelled >= 2, "it asks for versions and for metadata at least"
    assert num_open == 0
    gc.collect()  # a connection that is open and unreachable becomes a warning here, which is an error


async def test_control_aiokafka_loses_the_connection_it_bootstraps_over(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiokafka.client, "create_conn", kafka_clients._create_conn)
    config = config_for(kafka, await kafka.new_topic())
    _, num_open = await cancelled_at_each_request(STARTS["producer"], config, monkeypatch)
    assert num_open == 1
