"""What a new connection must prove before jobs are taken: a server that is new enough, and every command allowed."""

import re
import secrets
from collections.abc import Sequence

from redis.exceptions import ResponseError

from service.errors import SettingsError
from service.stream.connection import Connection, pack_command
from service.stream.keys import CLAIM, HAND_BACK, OPEN, JobKeys, Script
from service.stream.stream_config import StreamConfig

LEAST_VERSIONS = {"Redis": (6, 2), "Valkey": (7, 2)}
COMMANDS = (
    "client|setname del evalsha exists get hdel hget hincrby hmget hset ping pexpire publish script|load select set "
    "subscribe time unsubscribe xadd xrange"
)
"""What the Redis user of a worker has to be allowed, on `<namespace>:*` keys and channels."""
_PROBE_TTL_MS = 1_000


class ServerCheck:
    """Loads the scripts and runs each of them once, on keys that no job can have and that expire by themselves."""

    def __init__(self, config: StreamConfig, append: Script) -> None:
        self._config = config
        self._append = append

    async def __call__(self, connection: Connection) -> None:
        """Raises what the server refused, as for any command; SettingsError for a server that is too old."""
        _check_version(await connection.round_trip([pack_command("INFO", "server")]))
        scripts = (CLAIM, OPEN, self._append, HAND_BACK)
        _raise_refusal(
            await connection.round_trip([pack_command("SCRIPT", "LOAD", script.source) for script in scripts])
        )
        _raise_refusal(await connection.round_trip(self._trial()))

    def _trial(self) -> list[bytes]:
        """A refused job whose id another record takes over: it touches every command of every script."""
        nonce = secrets.token_hex(8)
        keys = JobKeys.of(f"?{nonce}", self._config.namespace)  # "?" is in no job's id

        def open_(record: str) -> bytes:
            arguments = (record, record, nonce + record, _PROBE_TTL_MS, "", 1)
            return pack_command("EVALSHA", OPEN.sha, 3, keys.meta, keys.cancel, keys.log, *arguments)

        append = pack_command(
            "EVALSHA", self._append.sha, 2, keys.meta, keys.log,
            1 << 52, nonce, _PROBE_TTL_MS, 16, keys.live, "a", "a", "", 1, "decided", "rejected", "refused", 0, "event",
        )  # fmt: skip
        hand_back = pack_command("EVALSHA", HAND_BACK.sha, 1, keys.meta, 1 << 52, nonce)
        claim = pack_command("EVALSHA", CLAIM.sha, 1, keys.cancel, nonce, _PROBE_TTL_MS)
        return [claim, open_("a"), append, hand_back, open_("b"), pack_command("XRANGE", keys.log, "(0", "+")]


def _raise_refusal(replies: Sequence[object]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            # Inside a script Redis 7 does not say which command it was.
            forbidden = "permission" in str(reply) or "can't run" in str(reply)
            raise ResponseError(f"{reply} (a worker needs {COMMANDS})") if forbidden else reply


def _check_version(replies: Sequence[object]) -> None:
    """A user who may not ask for it is let through: the scripts then tell."""
    reply = replies[0]
    if isinstance(reply, ResponseError) or not isinstance(reply, bytes):
        return
    text = reply.decode(errors="replace")
    for name in ("Valkey", "Redis"):
        found = re.search(rf"^{name.lower()}_version:(\d+)\.(\d+)(\S*)", text, re.MULTILINE)
        if found is None:
            continue
        least = LEAST_VERSIONS[name]
        if (int(found[1]), int(found[2])) < least:
            version = f"{found[1]}.{found[2]}{found[3]}"
            needed = " or ".join(f"{name} {major}.{minor}" for name, (major, minor) in LEAST_VERSIONS.items())
            raise SettingsError(
                f"TAILRACE_REDIS_URL: the server is {name} {version}; it must be at least {needed}"
            )
        return
