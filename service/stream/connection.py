"""One connection to Redis that only its owner uses, for whole round trips of several commands.

Commands are packed here, in advance where they repeat: redis-py packs argument by argument, and with one script call
per job and step that is most of the cost of a step.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import Sequence
from typing import Any

from redis import asyncio as redis_asyncio
from redis.exceptions import RedisError, ResponseError

from service.stream.stream_config import StreamConfig

UNAVAILABLE = (RedisError, OSError, TimeoutError)
"""What a command may raise when the connection or the server fails."""

_FOREIGN_VALUE = re.compile(
    r"WRONGTYPE|value is not an integer|would overflow|exhausted the last possible ID"
    r"|attempt to (?:compare|perform arithmetic|concatenate)"
)


def concerns_one_job(error: Exception) -> bool:
    """Tell whether a reply blames the value under a job's key: another program wrote it, and only that job fails.

    Everything else (OOM, READONLY, MISCONF, NOPERM, LOADING, …) is the server's or the operator's, however it is
    wrapped: before version 7 Redis hides the code of an error raised inside a script in the middle of a sentence.
    """
    return isinstance(error, ResponseError) and _FOREIGN_VALUE.search(str(error)) is not None


def pack_args(args: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args])


def pack_command(*args: bytes | str | int) -> bytes:
    encoded = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
    return b"*%d\r\n" % len(encoded) + pack_args(encoded)


class Connection:
    """Sends commands in one write and reads their replies in order.

    A round trip that fails, times out or is cancelled closes the connection, so that a late reply can never
    be taken for the reply to a later command.
    """

    def __init__(self, config: StreamConfig, client_name: str) -> None:
        self._config = config
        # Without a socket timeout: redis-py would start a task for every write to watch it.
        pool = redis_asyncio.ConnectionPool.from_url(
            config.redis_url, protocol=2, socket_timeout=None, client_name=client_name
        )
        # redis-py leaves the two calls below without annotations.
        self._connection: redis_asyncio.Connection = pool.make_connection()  # type: ignore[no-untyped-call]

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
                        # No timeout per reply: one around all of them is cheaper.
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
