"""A TCP proxy on loopback that a test can stall, cut and watch, in place of a bad network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

Direction = Literal["to_server", "to_client"]


class Proxy:
    def __init__(self, target_port: int, port: int = 0) -> None:
        """Listens on `port`, or on a free one."""
        self._target_port = target_port
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._passed = asyncio.Event()
        self._open = {"to_server": asyncio.Event(), "to_client": asyncio.Event()}
        self.accepting = True
        self.num_connections = 0
        self.chunks = {"to_server": 0, "to_client": 0}
        """Pieces forwarded so far; a request and its replies are one piece each unless they are large."""
        self.on_chunk: Callable[[Direction, bytes], None] | None = None
        """Called before a piece is forwarded; it may stall or cut."""
        self.resume()

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stall(self, direction: Direction) -> None:
        self._open[direction].clear()

    def resume(self) -> None:
        for gate in self._open.values():
            gate.set()

    def redirect(self, target_port: int) -> None:
        """New connections go to another server."""
        self._target_port = target_port

    def cut(self) -> None:
        """Close all connections at once; what is held back is lost."""
        for writer in list(self._writers):
            transport = writer.transport
            transport.abort()

    async def passed(self, direction: Direction, count: int) -> None:
        """Wait for that many more pieces."""
        target = self.chunks[direction] + count
        async with asyncio.timeout(5):
            while self.chunks[direction] < target:
                self._passed.clear()
                await self._passed.wait()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(client_writer)
        server_writer: asyncio.StreamWriter | None = None
        try:
            if not self.accepting:
                return
            self.num_connections += 1
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(server_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump("to_server", client_reader, server_writer))
                group.create_task(self._pump("to_client", server_reader, client_writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            for writer in (client_writer, server_writer):
                if writer is not None:
                    writer.close()
                    self._writers.discard(writer)
            self._tasks.discard(task)

    async def _pump(
        self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while chunk := await reader.read(1 << 16):
            if self.on_chunk is not None:
                self.on_chunk(direction, chunk)
            await self._open[direction].wait()
            writer.write(chunk)
            await writer.drain()
            self.chunks[direction] += 1
            self._passed.set()
        raise ConnectionResetError("the other side closed")


@asynccontextmanager
async def running_proxy(target_port: int, port: int = 0) -> AsyncIterator[Proxy]:
    proxy = Proxy(target_port, port)
    await proxy.start()
    try:
        yield proxy
    finally:
        with contextlib.suppress(ConnectionError):
            await proxy.stop()
