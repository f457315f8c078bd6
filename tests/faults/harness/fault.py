"""What a fault is, and the list of all."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.harness.testbed import Testbed

Inject = Callable[[Testbed, random.Random], Awaitable[None]]

PAUSE_S = (0.2, 1.5)
"""How long an outage lasts, unless the fault is about its length."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`inject` is called while jobs run, and returns when what it broke works again. It may publish and cancel."""

    name: str
    inject: Inject
    control: str = ""
    """The mechanism without which an invariant breaks."""
    settings: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    """For the worker processes themselves."""
    workers: int = 2
    limit_s: float = 30.0
    """How long a run may take on a quiet machine; a control waits no longer for what it has lost."""
    own_servers: bool = False
    """It stops or fills Kafka or Redis: it gets its own."""


FAULTS: dict[str, Fault] = {}


def fault(name: str, control: str, **options: Any) -> Callable[[Inject], Inject]:
    """Adds the decorated function to the list. Without a `control` no single mechanism stands against the fault."""

    def register(inject: Inject) -> Inject:
        FAULTS[name] = Fault(name, inject, control, **options)
        return inject

    return register


def victim(bed: Testbed, draw: random.Random) -> str:
    """A worker that lives."""
    return draw.choice(sorted(name for name, worker in bed.workers.items() if worker.exit_code is None))
