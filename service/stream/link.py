"""One connection to Redis that only its owner uses, for whole round trips of several commands."""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Connection, ConnectionPool
from redis.exceptions import RedisError, ResponseError

from service.stream.config import StreamConfig

UNAVAILABLE = (RedisError, OSError, TimeoutError)
"""What a command may raise when the connection or the server is no good."""


class Link:
    """Sends commands in one write and reads their replies in order.

    A round trip that fails, times out or is cancelled closes the connection, so that a late reply can never
    be taken for the reply to a later command.
    """

    def __init__(self, config: StreamConfig, client_name: str) -> None:
        self._config = config
        # Without a socket timeout: redis-py would start a task for every write to watch it.
        pool = ConnectionPool.from_url(config.url, protocol=2, socket_timeout=None, client_name=client_name)
        # redis-py leaves the two calls below without annotations.
        self._connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]

    @property
    def connected(self) -> bool:
        return bool(self._connection.is_connected)

    async def connect(self) -> None:
        """Raises one of UNAVAILABLE."""
        async with asyncio.timeout(self._config.connect_timeout_s):
            await self._connection.connect()  # type: ignore[no-untyped-call]

    async def round_trip(self, commands: Sequence[bytes]) -> list[Any]:
        """Replies in order; an error reply is returned as the exception, not raised."""
        connection = self._connection
        replies: list[Any] = []
        try:
            async with asyncio.timeout(self._config.command_timeout_s):
                await connection.send_packed_command(b"".join(commands), check_health=False)
                for _ in commands:
                    try:
                        # No timeout of its own per reply: the one around all of them is cheaper.
                        reply = await connection.read_response(disable_decoding=True, timeout=math.inf)
                    except ResponseError as error:
                        reply = error
                    replies.append(reply)
        except BaseException:
            await self.close()
            raise
        return replies

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self._connection.disconnect(nowait=True)
