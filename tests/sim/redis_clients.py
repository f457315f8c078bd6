"""Takes the place of the product's two ways to Redis: the publisher's connection, and redis-py for cancellations."""

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from service.stream.stream_config import StreamConfig
from tests.sim.loop import OWNER, State
from tests.sim.network import Network, Respond, Wire
from tests.sim.redis_server import RedisServer

REDIS = "redis"
P_SPLIT = 0.05
"""Share of round trips of several commands that reach the server in two pieces."""


def unpack_commands(data: bytes) -> list[list[bytes]]:
    """Reads what `pack_command` wrote."""
    commands = []
    position = 0
    while position < len(data):
        end = data.index(b"\r\n", position)
        count = int(data[position + 1 : end])
        position = end + 2
        command = []
        for _ in range(count):
            end = data.index(b"\r\n", position)
            size = int(data[position + 1 : end])
            command.append(data[end + 2 : end + 2 + size])
            position = end + 4 + size
        commands.append(command)
    return commands


class SimConnection:
    """Has the interface of `service.stream.connection.Connection`."""

    network: Network
    server: RedisServer

    def __init__(self, config: StreamConfig, client_name: str) -> None:
        self._config = config
        self._wire: Wire | None = None

    @property
    def connected(self) -> bool:
        return self._wire is not None and not self._wire.closed

    async def connect(self) -> None:
        wire = self.network.wire(OWNER.get(), REDIS)
        async with asyncio.timeout(self._config.connect_timeout_s):
            await wire.call(lambda respond: respond(b"OK"))
        self._wire = wire

    async def round_trip(self, commands: Sequence[bytes]) -> list[Any]:
        wire = self._wire
        if wire is None:
            raise RedisConnectionError("not connected")
        unpacked = unpack_commands(b"".join(commands))
        assert len(unpacked) == len(commands), "one command per item"
        try:
            async with asyncio.timeout(self._config.command_timeout_s):
                replies: list[Any] = await wire.call(lambda respond: self._serve(unpacked, respond))
        except BaseException:
            await self.close()
            raise
        return replies

    async def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _serve(self, commands: list[list[bytes]], respond: Respond) -> None:
        """Other clients' commands may come between two pieces; the second one may be lost."""
        rng, run = self.network.rng, self.server.run
        if len(commands) == 1 or self.network.over or rng.random() >= P_SPLIT:
            respond([run(command) for command in commands])
            return
        cut = rng.randrange(1, len(commands))
        first = [run(command) for command in commands[:cut]]
        if rng.random() < self.network.weather.p_lost_request * 5:
            return
        delay_s = self.network.latency()
        self.network.loop.later(
            delay_s, lambda: respond(first + [run(command) for command in commands[cut:]])
        )


class SimRedis:
    """As much of `redis.asyncio.Redis` as the cancel listener uses."""

    network: Network
    server: RedisServer

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._wire: Wire | None = None

    @classmethod
    def from_url(cls, url: str, *, socket_timeout: float, **options: Any) -> "SimRedis":
        return cls(socket_timeout)

    def pubsub(self) -> "SimPubSub":
        return SimPubSub(self.network, self.server)

    def pipeline(self, transaction: bool = True) -> "SimPipeline":
        return SimPipeline(self)

    async def run(self, commands: list[list[bytes]]) -> list[Any]:
        if self._wire is None or self._wire.closed:
            self._wire = self.network.wire(OWNER.get(), REDIS)
        try:
            async with asyncio.timeout(self._timeout_s):
                replies: list[Any] = await self._wire.call(
                    lambda respond: respond([self.server.run(command) for command in commands])
                )
        except BaseException:
            self._wire.close()
            raise
        return replies

    async def aclose(self) -> None:
        if self._wire is not None:
            self._wire.close()


class SimPipeline:
    def __init__(self, redis: SimRedis) -> None:
        self._redis = redis
        self._commands: list[list[bytes]] = []

    async def __aenter__(self) -> "SimPipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands = []

    def exists(self, key: str) -> None:
        self._commands.append([b"EXISTS", key.encode()])

    async def execute(self) -> list[Any]:
        return await self._redis.run(self._commands)


class SimPubSub:
    def __init__(self, network: Network, server: RedisServer) -> None:
        self._server = server
        self._owner = OWNER.get()
        self._wire = network.wire(self._owner, REDIS)
        self._wire.on_push = self._received
        self._messages: list[dict[str, Any]] = []
        self._arrived = asyncio.Event()
        self._wire.on_break = self._arrived.set

    async def subscribe(self, channel: str) -> None:
        name = channel.encode()

        def serve(respond: Respond) -> None:
            self._server.subscribe(name, self._wire)
            respond(b"subscribe")

        await self._wire.call(serve)
        self._append({"type": "subscribe", "data": 1})

    async def get_message(self, timeout: float) -> dict[str, Any] | None:
        """None when nothing came; a lost connection is noticed, as a socket's end is."""
        try:
            async with asyncio.timeout(timeout):
                while not self._messages:
                    self._arrived.clear()
                    if self._wire.closed:
                        raise RedisConnectionError("the subscription's connection was lost")
                    await self._arrived.wait()
        except TimeoutError:
            return None
        return self._messages.pop(0)

    async def ping(self) -> None:
        pong = self._wire.call(lambda respond: respond(b"PONG"))
        pong.add_done_callback(self._ponged)

    async def aclose(self) -> None:
        self._wire.close()

    def _received(self, message: bytes) -> None:
        self._append({"type": "message", "data": message})

    def _ponged(self, pong: "asyncio.Future[bytes]") -> None:
        if pong.cancelled() or pong.exception() is not None:
            self._arrived.set()
        else:
            self._append({"type": "pong", "data": b""})

    def _append(self, message: dict[str, Any]) -> None:
        if self._owner is None or self._owner.state is not State.DEAD:
            self._messages.append(message)
            self._arrived.set()
