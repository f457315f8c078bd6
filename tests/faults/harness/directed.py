"""Directed search: a worker is held at a named point of its code, an event happens there, and it goes on or does not.

The holes that random faults did not find were all between two such points, so every pair of a point and an event is
tried, for each way a job can go.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.harness.invariants import Texts, Violation
from tests.faults.harness.points import Armed
from tests.faults.harness.runs import Outcome, finish
from tests.faults.harness.testbed import Testbed, running_testbed
from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer

TARGET = "target"
HELD, HEIR = "held", "heir"
REACH_LIMIT_S = 20.0
TAKE_OVER_LIMIT_S = 4.0
"""How long a held worker waits for another one to end the job: after this it goes on anyway."""
DEADLINE_S = 1.5
END_LIMIT_S = 30.0

MEMBERSHIP = (
    "before partitions are assigned", "after partitions are assigned", "before offsets are restored",
    "after offsets are restored",
)  # fmt: skip
"""Reached while the worker joins, before there is a job."""

INTAKE = ("before intake", "before the stream is opened", "after the stream is opened")
ENDING = (
    "before the outcome is decided", "after the outcome is decided", "before the result is sent",
    "after the result is sent", "before the stream ends", "after the stream ends",
    "before the offsets are committed", "after the offsets are committed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """How the target job goes until its worker is held."""

    points: Sequence[str]
    body: dict[str, Any]
    cancelled: bool = False
    taken_over: bool = False
    """A first worker dies when it has decided the outcome."""


RUNNING = (
    "after the prompt is encoded", "before the requests are added", "before a write to Redis", "after a write to Redis",
    "before the job ends",
)  # fmt: skip
REFUSING = ("before a record is refused", "before the dead letter is sent", "after the dead letter is sent")

WAYS: dict[str, Way] = {
    "completes": Way((*MEMBERSHIP, *INTAKE, *RUNNING, *ENDING), {"max_tokens": 12}),
    "is cancelled": Way((*RUNNING[-1:], *ENDING), {"max_tokens": 2000}, cancelled=True),
    "is refused": Way((*INTAKE, *REFUSING, *ENDING), {"temprature": 1}),
    "was decided before": Way(
        (*INTAKE, "before a decided result is repeated", *ENDING[2:]), {"max_tokens": 12}, taken_over=True
    ),
}

CONTROLS: dict[str, tuple[str, str, str]] = {
    "decided outcome": ("completes", "before the stream ends", "kill"),
    "resume": ("completes", "before the job ends", "kill"),
    "fence": ("completes", "before the outcome is decided", "fence"),
    "suppressed redeliveries": ("completes", "after the stream ends", "kill"),
    "keys written again": ("completes", "before the outcome is decided", "Redis forgets"),
    "reconnecting to Redis": ("completes", "before the outcome is decided", "disconnect"),
    "cancellation before opening": ("is cancelled", "before the outcome is decided", "kill"),
    "refusal of unreadable records": ("is refused", "before the offsets are committed", "kill"),
}
"""For each mechanism a scene (way, point, event) that breaks a guarantee without it."""

Event = Callable[[Testbed], Awaitable[None]]


async def _kill(bed: Testbed) -> None:
    bed.workers[HELD].kill()
    await bed.forget_members(HELD)


async def _cancel(bed: Testbed) -> None:
    await bed.cancel(TARGET)


async def _fence(bed: Testbed) -> None:
    """The worker stops with all its threads, another one has its partition and the job, and it wakes again."""
    bed.workers[HELD].signal(signal.SIGSTOP)
    await bed.forget_members(HELD)
    await bed.auditor.wait_until_ended([TARGET], TAKE_OVER_LIMIT_S)
    bed.workers[HELD].signal(signal.SIGCONT)


async def _deadline(bed: Testbed) -> None:
    del bed
    await asyncio.sleep(1.2 * DEADLINE_S)


async def _disconnect(bed: Testbed) -> None:
    bed.redis_link.cut()


async def _send_again(bed: Testbed) -> None:
    await bed.publish([bed.ledger.bodies[TARGET]])


EVENTS: dict[str, Event] = {
    "kill": _kill,
    "cancel": _cancel,
    "fence": _fence,
    "deadline": _deadline,
    "disconnect": _disconnect,
    "Redis forgets": Testbed.forget_keys,
    "sent again": _send_again,
}


@dataclass(frozen=True, slots=True)
class Scene:
    way: str
    point: str
    event: str

    @property
    def name(self) -> str:
        return f"a job that {self.way}: {self.event} {self.point}"


def all_scenes() -> list[Scene]:
    """Every pair that can happen: a cancelled or refused job has no deadline left to miss."""
    return [
        Scene(way, point, event)
        for way, each in WAYS.items()
        for point in each.points
        for event in EVENTS
        if not (event == "deadline" and way != "completes")
        and not (event == "sent again" and (point in MEMBERSHIP or way == "is refused"))
    ]


async def play(
    scene: Scene,
    folder: Path,
    servers: tuple[KafkaBroker, RedisServer],
    texts: Texts,
    *,
    without: Sequence[str] = (),
) -> Outcome:
    """Plays one scene; a point that is not reached is a violation of the search itself."""
    started_s = time.monotonic()
    way = WAYS[scene.way]
    body = {"id": TARGET, "prompt": "why?", "ignore_eos": True, "return_token_ids": True} | way.body
    if scene.event == "deadline":
        body["deadline"] = DEADLINE_S
    async with running_testbed(
        folder, *servers, partitions=1, without=without, session_timeout_s="10"
    ) as bed:
        if way.cancelled and scene.event != "Redis forgets":  # which may forget the request, too
            bed.expected_status[TARGET] = "cancelled"
        if way.taken_over:
            await _decided_by_another(bed, body)
        reached = await _hold(bed, scene, way, body)
        if not reached:
            violation = Violation("the search itself", f"{scene.name}: the point was not reached")
            return Outcome(scene.name, 0, (violation,), 0, 0, (), time.monotonic() - started_s)
        await EVENTS[scene.event](bed)
        bed.points.go()
        return await finish(bed, scene.name, 0, texts, started_s, end_limit_s=END_LIMIT_S)


async def _decided_by_another(bed: Testbed, body: dict[str, Any]) -> None:
    first = bed.start_worker("first", armed=[Armed("after the outcome is decided", TARGET)])
    await bed.joined("first")
    await _publish(bed, body)
    assert await bed.points.reached(REACH_LIMIT_S)
    first.kill()
    bed.points.hold()
    await bed.forget_members()


async def _hold(bed: Testbed, scene: Scene, way: Way, body: dict[str, Any]) -> bool:
    """Starts the worker that is held and the one that stands by; returns whether the point was reached."""
    anywhere = scene.point in MEMBERSHIP or "offsets" in scene.point
    # The first commit of a partition that has none is made as it is assigned.
    nth = 2 if "offsets are committed" in scene.point and not way.taken_over else 1
    bed.start_worker(HELD, armed=[Armed(scene.point, "" if anywhere else TARGET, nth)])
    if scene.point in MEMBERSHIP or way.taken_over:
        reached = await bed.points.reached(REACH_LIMIT_S)
        bed.start_worker(HEIR)
        if not way.taken_over:
            await _publish(bed, body)
        return reached
    await bed.joined(HELD)
    bed.start_worker(HEIR)
    await bed.joined(HELD, HEIR)
    await _publish(bed, body)
    if way.cancelled:
        await bed.auditor.wait_for_events(TARGET, "delta", 3, REACH_LIMIT_S)
        await bed.cancel(TARGET)
    return await bed.points.reached(REACH_LIMIT_S)


async def _publish(bed: Testbed, body: dict[str, Any]) -> None:
    """The target among neighbours that must come to no harm."""
    neighbours = [
        {"id": f"neighbour-{i}", "prompt": f"{i}", "max_tokens": 8, "ignore_eos": True} for i in range(3)
    ]
    await bed.publish([neighbours[0], body, *neighbours[1:]], partition=0)
