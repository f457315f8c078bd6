"""Who may work on which partition: a worker that knows that it lost one begins nothing there any more.

A worker knows its assignment once it sends heartbeats in that generation. What it sent before may arrive much later, so
a moment counts only when nothing of its connections has been slow or cut for a while.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from tests.sim.broker import Partition

MARGIN_S = 2.0
"""For what a worker has begun before it knew."""


@dataclass(slots=True)
class Ownership:
    max_late_s: float
    """How late a request may arrive."""
    _told: dict[str, tuple[int, frozenset[Partition]]] = field(default_factory=dict)
    _known: dict[str, tuple[int, float, frozenset[Partition]]] = field(default_factory=dict)
    _disturbed_s: float = 0.0

    def assigned(self, worker: str, generation: int, partitions: Collection[Partition]) -> None:
        self._told[worker] = (generation, frozenset(partitions))

    def heartbeat(self, worker: str, generation: int, now_s: float) -> None:
        told = self._told.get(worker)
        known = self._known.get(worker)
        if told is not None and told[0] == generation and (known is None or known[0] != generation):
            # What it kept it has owned since before.
            kept_since_s = known[1] if known is not None and known[2] == told[1] else now_s
            self._known[worker] = (generation, kept_since_s, told[1])

    def disturbed_until(self, at_s: float) -> None:
        """Something is frozen, cut or down until then."""
        self._disturbed_s = max(self._disturbed_s, at_s)

    def may_begin(self, worker: str, partition: Partition, now_s: float) -> bool:
        known = self._known.get(worker)
        if known is None or partition in known[2] or partition in self._told[worker][1]:
            return True
        return now_s - max(known[1], self._disturbed_s) < MARGIN_S + 2 * self.max_late_s
