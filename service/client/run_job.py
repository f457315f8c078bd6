"""Runs one job through a client, real or fake: publish it, wait for its result, read its stream."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from service.client.lookup import Seen
from service.errors import DependencyError
from service.stream.assemble import StreamAssembler
from service.stream.reader import Item, Verdict
from service.wire import Result

STREAM_TIMEOUT_S = 30.0
"""The end event follows the result within milliseconds; a stream without one for so long has none."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of one job: its result, and whether its stream tells exactly the same."""

    result: Result
    texts: tuple[str, ...]
    """Joined from the stream, one per choice; empty when the stream was not read."""
    stream_verified: bool


class JobClient(Protocol):
    """What `Client` and `testing.FakeClient` have in common; programs that use either name this as their type."""

    async def publish(
        self, job_id: str, value: bytes, *, headers: tuple[tuple[str, bytes], ...] = ()
    ) -> None: ...

    def expect(self, job_id: str) -> "asyncio.Future[Result]": ...

    async def result_of(self, job_id: str, awaited: "asyncio.Future[Result] | None" = None) -> Result: ...

    async def run(
        self,
        job: Mapping[str, Any],
        *,
        verify_stream: bool = True,
        on_item: Callable[[Item], None] | None = None,
    ) -> Finished: ...

    async def seen(self, job_id: str, value: bytes) -> Seen: ...

    def stream(
        self, job_id: str, assembler: StreamAssembler | None = None, *, idle_timeout_s: float | None = None
    ) -> AsyncGenerator[Item, None]: ...

    async def cancel(self, job_id: str) -> None: ...


async def run_job(
    client: JobClient, job: Mapping[str, Any], *, verify_stream: bool, on_item: Callable[[Item], None] | None
) -> Finished:
    """Runs a job as `Client.run` describes."""
    job_id = str(job["id"])
    awaited = client.expect(job_id)
    live = None if on_item is None else asyncio.create_task(_read(client, job_id, on_item, None))
    try:
        await client.publish(job_id, orjson.dumps(job))
        result = await client.result_of(job_id, awaited)
        if not verify_stream:
            return Finished(result, (), False)
        reading = live or asyncio.create_task(_read(client, job_id, None, STREAM_TIMEOUT_S))
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                texts, whole = await reading
        except TimeoutError:
            return Finished(result, (), False)
    except asyncio.CancelledError:
        with contextlib.suppress(DependencyError):
            await client.cancel(job_id)
        raise
    finally:
        awaited.cancel()
        if live is not None:
            live.cancel()
    return _finished(result, texts, whole)


async def _read(
    client: JobClient, job_id: str, on_item: Callable[[Item], None] | None, idle_timeout_s: float | None
) -> tuple[list[str], bool]:
    """Returns the texts joined from the whole stream, and whether it is proven whole."""
    assembler = StreamAssembler(job_id)
    whole = False
    async with aclosing(client.stream(job_id, assembler, idle_timeout_s=idle_timeout_s)) as items:
        async for item in items:
            whole = isinstance(item, Verdict) and item.complete
            if on_item is not None:
                on_item(item)
    return assembler.texts(), whole


def _finished(result: Result, texts: list[str], whole: bool) -> Finished:
    """Verified only when the stream is whole and says what the result says."""
    expected = [choice.text for choice in result.choices]
    texts = texts + [""] * (len(expected) - len(texts))
    return Finished(result, tuple(texts), whole and texts == expected)
