"""Wraps a consumer's fetches: pauses where the broker does not hold them, repairs records that aiokafka cannot read.

Apache Kafka holds an empty fetch as long as it is asked to; a broker that answers at once would be asked again
hundreds of times a second.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.protocol.fetch import FetchRequest

from service.ingest.delivery import TopicPartition
from service.ingest.header_names import with_readable_header_names

PAUSE_S = 0.05
"""The longest that a new record waits, where the broker does not hold fetches."""
HELD_S = 0.1
"""The broker held an empty answer that took this long."""

Send = Callable[..., Awaitable[Any]]


class FetchThrottle:
    """Replaces the `send` of a consumer's client."""

    def __init__(self, send: Send, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self._send = send
        self._sleep = sleep
        self.unreadable: set[TopicPartition] = set()
        """Partitions in which a record's header names are not UTF-8: they are repaired before aiokafka sees them."""

    @classmethod
    def install(cls, consumer: AIOKafkaConsumer) -> "FetchThrottle":
        """Puts a throttle into aiokafka's client; call before the consumer is started."""
        throttle = cls(consumer._client.send)
        consumer._client.send = throttle
        return throttle

    async def __call__(self, node_id: Any, request: Any, **options: Any) -> Any:
        if not isinstance(request, FetchRequest):
            return await self._send(node_id, request, **options)
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        response = await self._send(node_id, request, **options)
        if self.unreadable:
            self._repair(response)
        if clock() - asked_s < HELD_S and is_empty(response):
            await self._sleep(PAUSE_S)
        return response

    def _repair(self, response: Any) -> None:
        response.topics = [
            (
                topic,
                [
                    (*fields[:-1], with_readable_header_names(fields[-1]))
                    if fields[-1] and (topic, fields[0]) in self.unreadable
                    else fields
                    for fields in partitions
                ],
            )
            for topic, partitions in response.topics
        ]


def is_empty(response: Any) -> bool:
    """Returns whether a fetch brought neither records nor an error for any partition."""
    return not any(
        partition[1] or partition[-1] for _, partitions in response.topics for partition in partitions
    )
