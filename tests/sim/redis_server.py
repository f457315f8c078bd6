"""A model of Redis for the commands that the product uses. Its scripts run as they are, in Lua 5.1.

Only the data model is ours (hashes, strings, streams, channels, expiry); conversions between Lua and commands follow
Redis. A whole server in Python (fakeredis) has its own clock, connections and random parts, which no seed decides, and
costs more per script than all else in a schedule.
"""

from collections.abc import Callable, Sequence
from hashlib import sha1
from typing import Any

import lupa.lua51 as lua
from redis.exceptions import NoScriptError, ResponseError

from tests.sim.loop import WALL_START_S, VirtualLoop
from tests.sim.network import Wire

Command = Sequence[bytes]

WRITES = frozenset((b"XADD", b"HSET", b"SET", b"HINCRBY"))
INFO = b"redis_version:7.2.0\r\n"


class RedisObserver:
    """What the auditor sees of a server, in the order in which it happens."""

    def added(self, key: bytes, event: bytes) -> None: ...
    def published(self, channel: bytes, message: bytes) -> None: ...
    def set_fields(self, key: bytes, values: dict[bytes, bytes]) -> None: ...
    def forgot(self) -> None: ...
    def evicted(self, key: bytes) -> None: ...


class _Lua:
    """One interpreter for all schedules: compiling the scripts anew would take most of their time."""

    def __init__(self) -> None:
        self.server: RedisServer | None = None
        self._compiled: dict[bytes, Any] = {}
        self._lua = lua.LuaRuntime(encoding=None)
        table = self._lua.table
        functions = {b"call": self._call, b"pcall": self._pcall, b"error_reply": self._error_reply}
        self._lua.globals()[b"redis"] = table_of(table(), functions)

    def run(self, server: "RedisServer", source: bytes, keys: Command, args: Command) -> Any:
        function = self._compiled.get(source)
        if function is None:
            function = self._compiled[source] = self._lua.eval(b"function(KEYS, ARGV) " + source + b"\nend")
        self.server = server
        return self._from_lua(function(self._lua.table(*keys), self._lua.table(*args)))

    def _call(self, *args: Any) -> Any:
        assert self.server is not None
        reply = self.server.execute([arg if isinstance(arg, bytes) else _argument(arg) for arg in args])
        return reply if isinstance(reply, (bytes, int)) else self._to_lua(reply)

    def _pcall(self, *args: Any) -> Any:
        try:
            return self._call(*args)
        except ResponseError as error:
            return self._error_reply(str(error).encode())

    def _error_reply(self, text: bytes) -> Any:
        return table_of(self._lua.table(), {b"err": text})

    def _to_lua(self, reply: Any) -> Any:
        if reply is None:
            return False
        if isinstance(reply, list):
            return self._lua.table(*[self._to_lua(item) for item in reply])
        return reply

    def _from_lua(self, value: Any) -> Any:
        if lua.lua_type(value) == "table":
            error = value[b"err"]
            if error is not None:
                return ResponseError(error.decode())
            return [self._from_lua(value[index]) for index in range(1, len(value) + 1)]
        if value is False:
            return None
        return int(value) if isinstance(value, float) else value


def table_of(table: Any, values: dict[bytes, Any]) -> Any:
    for name, value in values.items():
        table[name] = value
    return table


def _argument(arg: float) -> bytes:
    return b"%d" % arg if arg == int(arg) else repr(arg).encode()


_LUA = _Lua()


class RedisServer:
    """One server with one database. Commands are atomic; `execute` returns the reply or raises ResponseError."""

    def __init__(self, loop: VirtualLoop, observer: RedisObserver, clock_offset_s: float = 0.0) -> None:
        self._loop = loop
        self._observer = observer
        self._clock_offset_s = clock_offset_s
        self._subscribers: dict[bytes, list[Wire]] = {}
        self.refuses: Callable[[], bool] | None = None
        """Asked for each client's command: whether writes are refused for lack of memory. Of a script all are, or none:
        Redis does not stop one in the middle."""
        self._is_full = False
        self._num_entries = 0
        self._scripts: dict[bytes, bytes] = {}
        self._values: dict[bytes, Any] = {}
        self._expires_s: dict[bytes, float] = {}
        self._commands: dict[bytes, Callable[[Command], Any]] = {
            name.encode().upper(): getattr(self, f"_{name}")
            for name in (
                "ping", "info", "time", "get", "set", "exists", "hget", "hmget", "hset", "hdel", "hincrby", "pexpire",
                "xadd", "xrange", "publish", "evalsha", "script",
            )
        } | {b"DEL": self._delete}  # fmt: skip

    def forget(self) -> None:
        """Loses all data, as FLUSHALL or a restart without persistence does."""
        self._values.clear()
        self._expires_s.clear()
        self._observer.forgot()

    def restart(self) -> None:
        """Keeps its data and nothing else."""
        self._scripts.clear()
        self._subscribers.clear()

    def run(self, command: Command) -> Any:
        """A client's command: an error is returned, as in a reply."""
        self._is_full = self.refuses is not None and self.refuses()
        try:
            return self.execute(command)
        except ResponseError as error:
            return error

    def execute(self, command: Command) -> Any:
        name = command[0]
        if self._is_full and name in WRITES:
            raise ResponseError("OOM command not allowed when used memory > 'maxmemory'.")
        return self._commands[name](command)

    def keys(self) -> list[bytes]:
        return list(self._values)

    def evict(self, key: bytes) -> None:
        """Forgets one key, as an eviction policy does."""
        self._drop(key)
        self._observer.evicted(key)

    def subscribe(self, channel: bytes, wire: Wire) -> None:
        self._subscribers.setdefault(channel, []).append(wire)

    def wall_s(self) -> float:
        return WALL_START_S + self._loop.now_s + self._clock_offset_s

    def _value(self, key: bytes, kind: type) -> Any:
        expires_s = self._expires_s.get(key)
        if expires_s is not None and expires_s <= self._loop.now_s:
            self._drop(key)
        value = self._values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _drop(self, key: bytes) -> None:
        self._values.pop(key, None)
        self._expires_s.pop(key, None)

    def _ping(self, command: Command) -> bytes:
        return b"PONG"

    def _info(self, command: Command) -> bytes:
        return INFO

    def _time(self, command: Command) -> list[bytes]:
        seconds, micros = divmod(round(self.wall_s() * 1e6), 1_000_000)
        return [b"%d" % seconds, b"%d" % micros]

    def _get(self, command: Command) -> bytes | None:
        value: bytes | None = self._value(command[1], bytes)
        return value

    def _set(self, command: Command) -> bytes:
        self._drop(command[1])
        self._values[command[1]] = command[2]
        if len(command) > 3:
            unit_s = 0.001 if command[3].upper() == b"PX" else 1.0
            self._expires_s[command[1]] = self._loop.now_s + int(command[4]) * unit_s
        return b"OK"

    def _exists(self, command: Command) -> int:
        return int(self._value(command[1], object) is not None)

    def _delete(self, command: Command) -> int:
        found = sum(self._value(key, object) is not None for key in command[1:])
        for key in command[1:]:
            self._drop(key)
        return found

    def _hget(self, command: Command) -> bytes | None:
        value: bytes | None = (self._value(command[1], dict) or {}).get(command[2])
        return value

    def _hmget(self, command: Command) -> list[bytes | None]:
        held = self._value(command[1], dict) or {}
        return [held.get(name) for name in command[2:]]

    def _hset(self, command: Command) -> int:
        held = self._value(command[1], dict)
        if held is None:
            held = self._values[command[1]] = {}
        values = dict(zip(command[2::2], command[3::2], strict=True))
        added = sum(name not in held for name in values)
        held.update(values)
        self._observer.set_fields(command[1], values)
        return added

    def _hdel(self, command: Command) -> int:
        held = self._value(command[1], dict) or {}
        return sum(held.pop(name, None) is not None for name in command[2:])

    def _hincrby(self, command: Command) -> int:
        number = int(self._hget(command[:3]) or 0) + int(command[3])
        self._hset([b"HSET", command[1], command[2], b"%d" % number])
        return number

    def _pexpire(self, command: Command) -> int:
        if self._value(command[1], object) is None:
            return 0
        self._expires_s[command[1]] = self._loop.now_s + int(command[2]) / 1000
        return 1

    def _xadd(self, command: Command) -> bytes:
        """XADD key MAXLEN ~ count * field value. Logs here are shorter than any limit."""
        entries = self._value(command[1], list)
        if entries is None:
            entries = self._values[command[1]] = []
        self._num_entries += 1
        entry_id = b"%d-%d" % (round(self.wall_s() * 1000), self._num_entries)
        entries.append([entry_id, [command[6], command[7]]])
        self._observer.added(command[1], command[7])
        return entry_id

    def _xrange(self, command: Command) -> list[Any]:
        entries = self._value(command[1], list) or []
        begin = command[2]
        if begin.startswith(b"("):
            after = [index for index, entry in enumerate(entries) if entry[0] == begin[1:]]
            entries = entries[after[0] + 1 :] if after else []
        return list(entries[: int(command[5])] if len(command) > 5 else entries)

    def _publish(self, command: Command) -> int:
        _, channel, message = command
        self._observer.published(channel, message)
        alive = [wire for wire in self._subscribers.get(channel, ()) if wire.alive]
        self._subscribers[channel] = alive
        for wire in alive:
            wire.push(message)
        return len(alive)

    def _script(self, command: Command) -> bytes:
        sha = sha1(command[2], usedforsecurity=False).hexdigest().encode()
        self._scripts[sha] = command[2]
        return sha

    def _evalsha(self, command: Command) -> Any:
        source = self._scripts.get(command[1])
        if source is None:
            raise NoScriptError("No matching script")
        first_arg = 3 + int(command[2])
        try:
            return _LUA.run(self, source, command[3:first_arg], command[first_arg:])
        except lua.LuaError as error:
            raise ResponseError(f"ERR {error}") from error
