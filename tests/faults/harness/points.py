"""Named points of the worker's code at which a run can hold it. The product pays nothing: a point wraps a function from
outside, in a worker that was told to stop there."""

import asyncio
import functools
import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Point:
    module: str
    function: str
    """Class and method; a coroutine function."""
    when: Literal["before", "after"]
    """After: when it has returned, before its caller goes on."""


def _both(name: str, module: str, function: str) -> dict[str, Point]:
    return {
        f"before {name}": Point(module, function, "before"),
        f"after {name}": Point(module, function, "after"),
    }


POINTS: dict[str, Point] = {
    "before intake": Point("service.worker.intake", "Intake.take", "before"),
    **_both("the stream is opened", "service.stream.publisher", "StreamPublisher.open"),
    "after the prompt is encoded": Point("service.worker.specs", "RequestBuilder.prepare", "after"),
    "before the requests are added": Point("service.worker.intake", "Intake._add_requests", "before"),
    "before the job ends": Point("service.worker.completion", "Completion.end", "before"),
    **_both("the outcome is decided", "service.stream.writer", "AttemptWriter.decide"),
    **_both("the result is sent", "service.ingest.producer", "ResultProducer.send"),
    **_both("the stream ends", "service.stream.writer", "AttemptWriter.end"),
    **_both("the offsets are committed", "service.ingest.commits", "Committer._send"),
    "before a decided result is repeated": Point("service.worker.completion", "Completion.repeat", "before"),
    "before a record is refused": Point("service.worker.completion", "Completion.refuse_record", "before"),
    **_both("the dead letter is sent", "service.worker.completion", "Completion._dead_letter"),
    **_both("a write to Redis", "service.stream.connection", "Connection.round_trip"),
    **_both("partitions are revoked", "service.ingest.consumer", "_GroupMember.on_partitions_revoked"),
    **_both("partitions are assigned", "service.ingest.consumer", "_GroupMember.on_partitions_assigned"),
    **_both("offsets are restored", "service.ingest.poller", "Poller._restore"),
}


@dataclass(frozen=True, slots=True)
class Armed:
    point: str
    mention: str = ""
    """Only calls whose arguments name this; empty: every call."""
    nth: int = 1
    """Which of these calls stops, counted from 1."""


def install(armed: Sequence[Armed], socket: str) -> None:
    """Wraps the functions of these points; runs in the worker before it begins."""
    for each in armed:
        point = POINTS[each.point]
        owner: Any = importlib.import_module(point.module)
        *path, name = point.function.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, _wrapped(getattr(owner, name), each, point, socket))


def _wrapped(function: Callable[..., Any], armed: Armed, point: Point, socket: str) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    async def stops(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        mentioned = not armed.mention or any(armed.mention in _text(each) for each in (*args, *kwargs.values()))
        calls += mentioned
        here = mentioned and calls == armed.nth
        if here and point.when == "before":
            await _hold(socket, armed.point)
        returned = await function(*args, **kwargs)
        if here and point.when == "after":
            await _hold(socket, armed.point)
        return returned

    return stops


def _text(value: object) -> str:
    """What identifies a job among the arguments of the functions above: its id, or a run, writer or record of it."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list):
        return " ".join(map(_text, value))
    attempt = getattr(value, "attempt", None)
    found = [getattr(value, "job_id", ""), getattr(attempt, "job_id", "")]
    delivery = getattr(value, "delivery", None)
    if delivery is not None:
        found.append((delivery.key or b"").decode(errors="replace"))
    return value if isinstance(value, str) else " ".join(map(str, found))


async def _hold(socket: str, point: str) -> None:
    """Tells the run where this worker is; goes on when told."""
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(json.dumps({"point": point, "pid": os.getpid()}).encode() + b"\n")
    await writer.drain()
    await reader.readline()
    writer.close()


class PointServer:
    """The run's side: waits until a worker is at a point, and lets it go on."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self._server: asyncio.Server | None = None
        self._reached = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)

    async def reached(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._reached.wait()
        except TimeoutError:
            return False
        return True

    def go(self) -> None:
        for writer in self._writers:
            writer.write(b"go\n")
            writer.close()
        self._writers.clear()

    async def stop(self) -> None:
        self.go()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        self._writers.append(writer)
        self._reached.set()
