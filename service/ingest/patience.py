"""For brokers that answer an empty fetch at once, though they were asked to hold it: without a pause of ours aiokafka
would ask again hundreds of times a second. Apache Kafka holds it, and then nothing here waits.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.protocol.fetch import FetchRequest

PAUSE_S = 0.05
"""What a new record waits for at most, where the broker does not hold fetches."""
HELD_S = 0.1
"""An empty answer that took this long was held."""

Send = Callable[..., Awaitable[Any]]


def hold_empty_fetches(consumer: AIOKafkaConsumer) -> AIOKafkaConsumer:
    """Make a consumer patient, before it is started; returns it. Reaches into aiokafka's client."""
    consumer._client.send = patient(consumer._client.send)
    return consumer


def patient(send: Send, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> Send:
    """`send`, but an empty answer to a fetch that came too early is passed on after a pause."""

    async def patient_send(node_id: Any, request: Any, **options: Any) -> Any:
        if not isinstance(request, FetchRequest):
            return await send(node_id, request, **options)
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        response = await send(node_id, request, **options)
        if clock() - asked_s < HELD_S and is_empty(response):
            await sleep(PAUSE_S)
        return response

    return patient_send


def is_empty(response: Any) -> bool:
    """Whether a fetch brought neither records nor an error for any partition."""
    return not any(
        partition[1] or partition[-1] for _, partitions in response.topics for partition in partitions
    )
