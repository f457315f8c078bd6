"""Connections between processes and servers: ordered bytes, as TCP gives them, with everything that can go wrong.

A request can be lost with its connection, its reply can be lost, either can take long; the client may have given up by
then, and the server carries the request out all the same. Connections are ordered in themselves and independent of
each other, so requests of two connections overtake each other.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.loop import Process, State, VirtualLoop

Respond = Callable[[Any], None]
Serve = Callable[[Respond], None]

INSTANT_S = 1e-7
"""Between two messages of one connection: timers of one moment fire in any order."""
SILENT_SHARE = 0.3
"""Of broken connections, those whose client is not told: it waits until its own time limit."""


@dataclass(slots=True)
class Weather:
    """How bad the network is, now."""

    latency_s: float = 0.001
    """Mean of one way."""
    p_lost_request: float = 0.0
    p_lost_reply: float = 0.0
    p_late: float = 0.0
    max_late_s: float = 0.0
    """A late request arrives up to this long after it was sent."""


CALM = Weather()


class Network:
    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = CALM
        self.down: set[str] = set()
        """Servers that accept no connection."""
        self.over = False
        """The schedule has ended: every request fails at once."""
        self._held_until: dict[tuple[str, str], float] = {}
        self._wires: list[Wire] = []

    def wire(self, owner: Process | None, server: str) -> "Wire":
        """A new connection; it fails at its first request when the server is down."""
        wire = Wire(self, owner, server)
        self._wires = [known for known in self._wires if not known.closed]
        self._wires.append(wire)
        return wire

    def latency(self) -> float:
        return self.rng.expovariate(1.0 / self.weather.latency_s)

    def hold(self, owner: Process, server: str, seconds: float) -> None:
        """Nothing passes between the two for so long; what is sent meanwhile arrives afterwards."""
        self._held_until[owner.name, server] = self.loop.now_s + seconds

    def passes_at(self, owner: Process | None, server: str) -> float:
        return self._held_until.get((owner.name, server), 0.0) if owner is not None else 0.0

    def stop_server(self, server: str) -> None:
        self.down.add(server)
        self.break_all(server)

    def start_server(self, server: str) -> None:
        self.down.discard(server)

    def break_all(self, server: str) -> None:
        for wire in self._wires:
            if wire.server == server:
                wire.break_off()

    def close_all(self, owner: Process) -> None:
        """A dead process's kernel closes its connections; what it has sent may still arrive."""
        for wire in self._wires:
            if wire.owner is owner:
                wire.close()

    def heal(self) -> None:
        """Ends all faults of the network; late requests may still be on their way."""
        self.weather = CALM
        self.down.clear()
        self._held_until.clear()


class Wire:
    """One connection of one client. After the first failure it is closed for good."""

    def __init__(self, network: Network, owner: Process | None, server: str) -> None:
        self._network = network
        self.owner = owner
        self.server = server
        self.closed = False
        """No reply comes through any more."""
        self.on_push: Callable[[Any], None] | None = None
        self.on_break: Callable[[], None] | None = None
        self._lost = False
        """Requests on their way are lost as well."""
        self._arrives_s = self._returns_s = 0.0
        self._waiting: dict[asyncio.Future[Any], None] = {}

    def call(self, serve: Serve) -> "asyncio.Future[Any]":
        """Sends a request; `serve` runs when it arrives and is given the way to answer, then or later.

        The future gets the answer, or ConnectionError, or nothing ever: the caller sets its own limit.
        """
        network, loop = self._network, self._network.loop
        future: asyncio.Future[Any] = loop.create_future()
        if self.closed or network.over or self.server in network.down:
            self.closed = True
            self._fail(future, "is closed")
            return future
        self._waiting[future] = None
        weather, rng = network.weather, network.rng
        arrives_s = max(loop.now_s + network.latency(), network.passes_at(self.owner, self.server))
        fate = rng.random()
        if fate < weather.p_late:
            arrives_s += rng.uniform(0.0, weather.max_late_s)
        self._arrives_s = max(self._arrives_s + INSTANT_S, arrives_s)
        fate -= weather.p_late
        if fate < 0 or fate >= weather.p_lost_request + weather.p_lost_reply:
            loop.at(self._arrives_s, self._arrive, serve, future)
        elif fate < weather.p_lost_request:
            loop.at(self._arrives_s, self._break_at_random)
        else:
            loop.at(self._arrives_s, self._arrive_unanswered, serve)
        return future

    def push(self, message: Any) -> None:
        """Sends a message from the server, in order with its answers; lost when the connection is."""
        self._at_client(self._push_arrives, message)

    def close(self) -> None:
        """Closes the client's end. What it has sent is usually on its way already."""
        self.closed = True
        self._lost = self._network.rng.random() < 0.2
        self._fail_waiting()

    def break_off(self) -> None:
        """Breaks the connection in the middle: the client learns it, and what is on its way is lost."""
        self._lost = True
        if not self.closed:
            self.closed = True
            self._network.loop.later(self._network.latency(), self._fail_waiting)

    def _break_at_random(self) -> None:
        self._lost = self.closed = True
        if self._network.rng.random() >= SILENT_SHARE:
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        if self.on_break is not None:
            self.on_break()
        for future in waiting:
            if not future.done():
                self._fail(future, "was lost")

    def _fail(self, future: "asyncio.Future[Any]", what: str) -> None:
        future.set_exception(ConnectionResetError(f"{self.server}: the connection {what}"))
        future.exception()  # Looked at, so that asyncio does not complain where the client has given up.

    def _arrive_unanswered(self, serve: Serve) -> None:
        if not self._lost and self.server not in self._network.down:
            serve(_nothing)
        self._break_at_random()

    def _arrive(self, serve: Serve, future: "asyncio.Future[Any]") -> None:
        if self._lost or self.server in self._network.down or self._network.over:
            return
        serve(lambda answer: self._at_client(self._settle, future, answer))

    def _at_client(self, callback: Callable[..., None], *args: Any) -> None:
        network = self._network
        at_s = max(network.loop.now_s + network.latency(), network.passes_at(self.owner, self.server))
        self._returns_s = max(self._returns_s + INSTANT_S, at_s)
        network.loop.at(self._returns_s, callback, *args)

    def _push_arrives(self, message: Any) -> None:
        if not self.closed and self.on_push is not None:
            self.on_push(message)

    def _settle(self, future: "asyncio.Future[Any]", answer: Any) -> None:
        self._waiting.pop(future, None)
        if self.closed or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    @property
    def alive(self) -> bool:
        """Whether the server still sees a client: a dead process's connections are closed by its kernel."""
        return not self.closed and (self.owner is None or self.owner.state is not State.DEAD)


def _nothing(answer: Any) -> None:
    del answer
