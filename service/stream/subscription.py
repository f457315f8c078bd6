"""One pub/sub channel on its own connection, with a sign whenever messages may have been missed."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from enum import Enum, auto
from typing import Any

from redis.asyncio import Redis

from service.stream.connection import UNAVAILABLE
from service.stream.stream_config import StreamConfig
from service.waiting import cancellation_kept


class Sign(Enum):
    CONFIRMED = auto()
    """The subscription begins here; earlier messages may have been missed."""
    SILENCE = auto()
    """Nothing came for a heartbeat, and the connection is alive."""


async def subscription(
    redis: Redis, channel: str, config: StreamConfig
) -> AsyncGenerator[bytes | Sign, None]:
    """Messages of the channel until the connection is lost: then raises one of UNAVAILABLE.

    A client with retries subscribes again by itself; the only trace of that is that the server's confirmation
    arrives once more. Therefore every confirmation is handed on. Close the generator to leave.
    """
    pubsub = redis.pubsub()
    try:
        with cancellation_kept():
            async with asyncio.timeout(config.connect_timeout_s):
                await pubsub.subscribe(channel)
        pinged = False
        while True:
            # Longer than a heartbeat, to bound a reconnect that redis-py makes inside the call.
            with cancellation_kept():
                async with asyncio.timeout(config.heartbeat_s + config.connect_timeout_s):
                    message: dict[str, Any] | None = await pubsub.get_message(timeout=config.heartbeat_s)
            if message is not None:
                if message["type"] == "message":
                    data = message["data"]
                    yield data.encode() if isinstance(data, str) else data
                else:
                    yield Sign.CONFIRMED if message["type"] == "subscribe" else Sign.SILENCE
                pinged = False
            elif pinged:
                raise ConnectionError(f"Redis did not answer a PING within {config.heartbeat_s} s")
            else:
                pinged = True
                with cancellation_kept():
                    async with asyncio.timeout(config.command_timeout_s):
                        await pubsub.ping()
    finally:
        # Bounded and never raising: the connection may be in any state.
        with contextlib.suppress(*UNAVAILABLE):
            async with asyncio.timeout(config.close_timeout_s):
                await pubsub.aclose()  # type: ignore[no-untyped-call]
