"""Makes the faults of a plan happen."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.sim.faults import Fault
from tests.sim.fleet import Fleet, Node
from tests.sim.kafka_clients import KAFKA
from tests.sim.loop import VirtualLoop
from tests.sim.network import Network
from tests.sim.ownership import Ownership
from tests.sim.redis_clients import REDIS
from tests.sim.redis_server import RedisServer

MAX_DOWN_S = 2.0
"""A server, or a killed worker, is back after that."""


@dataclass(slots=True)
class Injector:
    """Each kind of fault is a method: of a running worker, or of the servers."""

    loop: VirtualLoop
    network: Network
    redis: RedisServer
    fleet: Fleet
    ownership: Ownership
    note: Callable[[str], None]
    counts: Counter[str] = field(default_factory=Counter)

    def inject(self, fault: Fault) -> None:
        """A fault of a worker that does not run is left out."""
        of_server = getattr(self, f"_server_{fault.kind}", None)
        node = self.fleet.running(fault.worker)
        self.note(f"fault {fault.kind} {node and node.process} {fault.seconds:.3f} s")
        if of_server is not None:
            of_server(min(fault.seconds, MAX_DOWN_S))
        elif node is not None:
            getattr(self, f"_worker_{fault.kind}")(node, fault.seconds)
        else:
            return
        self.counts[fault.kind] += 1
        self.ownership.disturbed_until(self.loop.now_s + fault.seconds)

    def heal(self) -> None:
        self.network.heal()
        self._accept_writes()
        self.fleet.resume_all()

    def _worker_kill(self, node: Node, seconds: float) -> None:
        self.fleet.kill(node, min(seconds, MAX_DOWN_S))

    def _worker_freeze(self, node: Node, seconds: float) -> None:
        self.fleet.freeze(node, seconds)

    def _worker_drain(self, node: Node, seconds: float) -> None:
        self.fleet.drain(node)

    def _worker_isolate(self, node: Node, seconds: float) -> None:
        self._worker_cut_from_redis(node, seconds)
        self._worker_cut_from_kafka(node, seconds)

    def _worker_cut_from_redis(self, node: Node, seconds: float) -> None:
        self.network.hold(node.process, REDIS, seconds)

    def _worker_cut_from_kafka(self, node: Node, seconds: float) -> None:
        self.network.hold(node.process, KAFKA, seconds)

    def _server_break_connections(self, seconds: float) -> None:
        self.network.break_all(REDIS)
        self.network.break_all(KAFKA)

    def _server_restart_redis(self, seconds: float) -> None:
        self.redis.restart()
        self._stop(REDIS, seconds)

    def _server_restart_redis_empty(self, seconds: float) -> None:
        self.redis.forget()
        self._server_restart_redis(seconds)

    def _server_flush_redis(self, seconds: float) -> None:
        self.redis.forget()

    def _server_evict_key(self, seconds: float) -> None:
        keys = self.redis.keys()
        if keys:
            self.redis.evict(self.network.rng.choice(keys))

    def _server_refuse_writes(self, seconds: float) -> None:
        rng = self.network.rng
        share = rng.choice((0.1, 0.5, 1.0))
        self.redis.refuses = lambda: rng.random() < share
        self.loop.later(seconds, self._accept_writes)

    def _server_stop_kafka(self, seconds: float) -> None:
        self._stop(KAFKA, seconds)

    def _stop(self, server: str, seconds: float) -> None:
        self.network.stop_server(server)
        self.loop.later(seconds, self.network.start_server, server)

    def _accept_writes(self) -> None:
        self.redis.refuses = None
