"""A client's call that is cancelled ends, whatever the libraries below it do with the cancellation."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from service.client import Client


class Swallowing:
    """Answers just as the caller is cancelled, and loses that, as `asyncio.wait_for` of Python 3.11 does."""

    def __init__(self) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def call(self, *args: Any, **options: Any) -> None:
        self.asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self.answer.wait()

    send_and_wait = hget = set = call

    async def hmget(self, *args: Any) -> list[None]:
        await self.call()
        return [None] * 3

    async def publish(self, *args: Any) -> None:
        pass


CALLS: dict[str, Callable[[Client], Awaitable[object]]] = {
    "publish": lambda client: client.publish("j", b"{}"),
    "seen": lambda client: client.seen("j", b"{}"),
    "cancel": lambda client: client.cancel("j"),
    "result_of": lambda client: client.result_of("j"),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_cancellation_that_a_library_swallows_is_kept(name: str) -> None:
    below: Any = Swallowing()
    client = Client(kafka=False)
    await client.redis.aclose()
    client.redis, client._producer = below, below
    task = asyncio.ensure_future(CALLS[name](client))
    await below.asked.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
