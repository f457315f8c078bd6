"""One schedule: servers, workers and clients in one virtual time, with everything random drawn from one seed."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tests.sim.auditor import Auditor
from tests.sim.broker import Broker
from tests.sim.faults import make_plan
from tests.sim.fleet import Fleet
from tests.sim.group import Group, Phase, name_of
from tests.sim.injector import Injector
from tests.sim.kafka_clients import Cluster
from tests.sim.loop import OWNER, StuckError, VirtualLoop, VirtualTime
from tests.sim.network import Network
from tests.sim.ownership import Ownership
from tests.sim.redis_server import RedisServer
from tests.sim.worker import Surroundings, logs_to, replaced
from tests.sim.workload import Submission, make_workload

JOBS, RESULTS, LETTERS = "tailrace.jobs", "tailrace.results", "tailrace.dead-letter"
TOPICS = {JOBS: 3, RESULTS: 2, LETTERS: 1}

POLL_S = 0.25
SETTLE_LIMIT_S = 60.0
"""After the faults have ended everything is terminal and committed within this time."""
REST_LIMIT_S = 15.0
"""After that no worker holds anything of a job. Longer than a session and the retry of a superseded job."""
CLOSE_LIMIT_S = 30.0


@dataclass(slots=True)
class Outcome:
    seed: int
    violations: list[str]
    trace: list[str]
    num_callbacks: int
    ended_s: float
    counts: dict[str, int] = field(default_factory=dict)
    """Faults that happened, by kind."""


class World:
    def __init__(self, seed: int, *, traced: bool = False) -> None:
        """Traced, it notes all that the servers see and the workers log."""
        self.seed = seed
        self.loop = VirtualLoop()
        self.trace: list[str] = []
        self._traced = traced
        self.rng = random.Random(seed)
        self.plan = make_plan(self.rng)
        self.workload = make_workload(self.rng, self.plan.chaos_s)
        self.network = Network(self.loop, self.rng)
        self.ownership = Ownership(self.plan.weather.max_late_s)
        note = self.note if traced else _ignore
        self.auditor = Auditor(
            self.workload, (RESULTS, LETTERS), self.ownership, self.loop.time, note, forgets=self.plan.forgets
        )
        self.redis = RedisServer(self.loop, self.auditor, clock_offset_s=self.rng.choice((0.0, 5.0, -5.0)))
        self.broker = Broker(self.loop, self.auditor, TOPICS)
        self.group = Group(self.loop, self.rng, self.broker, JOBS, self.ownership, note)
        self.fleet = Fleet(self.loop, self.network, self.plan, self.auditor.report, note)
        self.injector = Injector(self.loop, self.network, self.redis, self.fleet, self.ownership, note)

    def note(self, text: str) -> None:
        if self._traced:
            self.trace.append(f"{self.loop.now_s:10.6f} {text}")

    def run(self, control: AbstractContextManager[None] | None = None) -> Outcome:
        """Runs the schedule from its beginning to its end; once."""
        asyncio.set_event_loop(None)
        self.loop.set_exception_handler(self._unhandled)
        cluster = Cluster(self.network, self.broker, self.group)
        with (
            VirtualTime(self.loop),
            replaced(Surroundings(self.loop, self.network, cluster, self.redis)),
            logs_to(self._log if self._traced else None),
            control or contextlib.nullcontext(),
        ):
            try:
                self.loop.run_until_complete(self.loop.create_task(self._drive(), context=self.loop.neutral))
            except StuckError as error:
                self.auditor.report("G8", str(error))
            outcome = Outcome(
                self.seed,
                self.auditor.violations,
                self.trace,
                self.loop.num_callbacks,
                self.loop.now_s,
                dict(self.injector.counts) | {"foreign_claim": self.fleet.num_refused},
            )
            self._traced = False  # tasks are cancelled in any order
            self._close()
        return outcome

    async def _drive(self) -> None:
        plan, loop = self.plan, self.loop
        self.note(f"{plan}")
        self.network.weather = plan.weather
        if plan.foreign_claim_s:
            ttl = b"%d" % round(plan.foreign_claim_s * 1000)
            self.redis.run([b"SET", b"tailrace:deployment", b'{"group":"other"}', b"PX", ttl])
        self.fleet.start_all()
        for submission in self.workload.submissions:
            loop.at(submission.at_s, self._submit, submission)
        for job_id, at_s in self.workload.cancels.items():
            loop.at(max(0.0, at_s), self._cancel, job_id)
        for fault in plan.faults:
            loop.at(fault.at_s, self.injector.inject, fault)
        await asyncio.sleep(plan.chaos_s)
        self.note("the faults have ended")
        self.injector.heal()
        if await self._settles():
            await self._rest()
        self.auditor.finish()
        if plan.drained:
            self.note("drain")
            await self.fleet.drain_all()
            if self.group.members:
                self.auditor.report("G11", f"{', '.join(self.group.members)} did not leave the group")

    # Clients

    def _submit(self, submission: Submission) -> None:
        gap = self.rng.choice((0, 0, 0, 0, 1, 3))
        partition = self.broker.partition_of(JOBS, submission.job_id.encode())
        submission.partition, submission.offset = partition, self.broker.logs[partition].end + gap
        self.auditor.by_origin[(*partition, submission.offset)] = submission
        self.note(f"submit {submission.kind} {submission.job_id} at {partition[1]}/{submission.offset}")
        self.broker.append(partition, [submission.record()], gap)

    def _cancel(self, job_id: str) -> None:
        """The key is set; the message follows, or not."""
        self.note(f"cancel {job_id}")
        command = [b"SET", b"tailrace:{%b}:cancel" % job_id.encode(), b"1", b"EX", b"3600"]
        if isinstance(self.redis.run(command), Exception):
            self.loop.later(0.1, self._cancel, job_id)
            return
        if self.rng.random() < 0.9:
            message = [b"PUBLISH", b"tailrace:control", job_id.encode()]
            self.loop.later(self.network.latency(), self.redis.run, message)

    # The end

    async def _settles(self) -> bool:
        """Waits until everything is terminal and committed; reports what is not in time."""
        limit_s = self.loop.now_s + SETTLE_LIMIT_S
        while open_work := self._open_work():
            if self.loop.now_s > limit_s:
                for what in open_work:
                    self.auditor.report("G8", what)
                return False
            await asyncio.sleep(POLL_S)
        return True

    def _open_work(self) -> list[str]:
        found = []
        for submission in self.workload.submissions:
            if not self.auditor.is_terminal(submission):
                found.append(f"{submission.kind} {submission.job_id} does not end")
            elif not self.auditor.is_covered(submission):
                found.append(f"{submission.kind} {submission.job_id} is never committed")
        for partition, log in self.broker.logs.items():
            committed = self.broker.commits.get(partition, (0, ""))[0]
            if partition[0] == JOBS and committed != log.end:
                found.append(f"the commit of {partition} stays at {committed} of {log.end}")
        return found

    async def _rest(self) -> None:
        """Waits until no worker holds anything, and all are in the group and nothing else is."""
        limit_s = self.loop.now_s + REST_LIMIT_S
        while True:
            await asyncio.sleep(POLL_S)
            left = {str(node.process): leaks for node in self.fleet.nodes if (leaks := node.leaks())}
            members = sorted(map(name_of, self.group.members))
            in_group = members == self.fleet.names and self.group.phase is Phase.STABLE
            if not left and in_group and self.fleet.is_complete:
                return
            if self.loop.now_s > limit_s:
                self.auditor.report("G10", f"workers {self.fleet.names}, group {members}, kept: {left}")
                return

    def _log(self, text: str) -> None:
        self.note(f"{OWNER.get()} {text}")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.fleet.is_closing:
            self.auditor.report("G9", f"{context['message']}: {context.get('exception')!r}")

    def _close(self) -> None:
        """Cancels everything, the tasks of dead processes too, so that no coroutine is left to the collector."""
        self.network.over = True
        self.loop.num_callbacks_limit = None
        self.fleet.bury()
        for _ in range(5):
            tasks = asyncio.all_tasks(self.loop)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            waiting = self.loop.create_task(
                asyncio.wait(tasks, timeout=CLOSE_LIMIT_S), context=self.loop.neutral
            )
            self.loop.run_until_complete(waiting)
        self.loop.run_until_complete(self.loop.create_task(self.loop.shutdown_asyncgens()))
        self.loop.close()


def _ignore(text: str) -> None:
    del text


def run_schedule(
    seed: int, *, traced: bool = False, control: Callable[[], AbstractContextManager[None]] | None = None
) -> Outcome:
    return World(seed, traced=traced).run(control() if control is not None else None)
