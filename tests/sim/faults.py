"""Which faults a schedule has, and when. Drawn before it begins: they do not depend on what the product does."""

import random
from dataclasses import dataclass, field

from tests.sim.network import Weather

SESSION_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: str
    """As `Injector` names it."""
    worker: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Plan:
    chaos_s: float
    """Faults begin before this time and have ended at it."""
    num_workers: int
    weather: Weather
    mean_step_s: float
    faults: list[Fault] = field(default_factory=list)
    clock_offsets_s: list[float] = field(default_factory=list)
    foreign_claim_s: float = 0.0
    """For so long another deployment has the namespace when the workers start."""
    drained: bool = False
    """Whether the schedule ends with a drain of all workers."""

    @property
    def forgets(self) -> bool:
        """Whether Redis loses its memory at some time."""
        return any(fault.kind in ("restart_redis_empty", "flush_redis", "evict_key") for fault in self.faults)


KINDS = (
    ("kill", 4),
    ("freeze", 4),
    ("drain", 1),
    ("isolate", 3),
    ("cut_from_redis", 3),
    ("cut_from_kafka", 3),
    ("restart_redis", 1),
    ("stop_kafka", 1),
    ("restart_redis_empty", 1),
    ("flush_redis", 1),
    ("evict_key", 1),
    ("refuse_writes", 1),
    ("break_connections", 2),
)


def make_plan(rng: random.Random) -> Plan:
    chaos_s = rng.uniform(2.0, 8.0)
    weather = Weather(latency_s=rng.choice((0.001, 0.01, 0.05)))
    if rng.random() < 0.6:
        p = rng.choice((0.003, 0.01, 0.03))
        weather.p_lost_request = weather.p_lost_reply = weather.p_late = p
        weather.max_late_s = rng.choice((1.0, 6.0))
    plan = Plan(chaos_s, rng.choice((2, 2, 2, 3)), weather, rng.choice((0.005, 0.03, 0.1)))
    plan.clock_offsets_s = [rng.choice((0.0, 0.0, 10_800.0, -10_800.0)) for _ in range(plan.num_workers)]
    if rng.random() < 0.05:
        plan.foreign_claim_s = rng.uniform(0.5, 3.0)
    plan.drained = rng.random() < 0.3
    names, weights = zip(*KINDS, strict=True)
    for _ in range(rng.choice((0, 1, 2, 3, 5, 8))):
        kind = rng.choices(names, weights)[0]
        at_s = rng.uniform(0.0, chaos_s)
        left_s = chaos_s - at_s
        # Half of the long ones outlive the session, so that the group evicts the worker while it lives on.
        seconds = min(left_s, rng.choice((0.2, 1.5, SESSION_TIMEOUT_S + 1.0, 8.0)) * rng.uniform(0.7, 1.3))
        plan.faults.append(Fault(at_s, kind, rng.randrange(plan.num_workers), seconds))
    plan.faults.sort(key=lambda fault: fault.at_s)
    return plan
