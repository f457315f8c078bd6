"""One schedule: servers, workers and clients in one virtual time, with everything random drawn from one seed."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from service.errors import SettingsError
from tests.sim.auditor import Auditor
from tests.sim.broker import Broker
from tests.sim.faults import Fault, Plan, make_plan
from tests.sim.group import Group, Phase
from tests.sim.kafka_clients import KAFKA, Cluster
from tests.sim.loop import Process, State, StuckError, VirtualLoop, VirtualTime, context_of
from tests.sim.network import Network
from tests.sim.ownership import Ownership
from tests.sim.redis_clients import REDIS
from tests.sim.redis_server import RedisServer
from tests.sim.worker import NUM_BLOCKS, SimWorker, Surroundings, logs_to, replaced
from tests.sim.workload import Submission, Workload, make_workload

JOBS, RESULTS, LETTERS = "tailrace.jobs", "tailrace.results", "tailrace.dead-letter"
TOPICS = {JOBS: 3, RESULTS: 2, LETTERS: 1}

SETTLE_LIMIT_S = 60.0
"""After the faults have ended everything is terminal and committed within this time."""
DRAIN_LIMIT_S = 15.0
"""A drain's grace period and the time to hand back."""
REST_LIMIT_S = 15.0
"""After that no worker holds anything of a job. Longer than a session and the retry of a superseded job."""
OF_SERVERS = ("restart_redis", "restart_redis_empty", "flush_redis", "evict_key", "refuse_writes", "stop_kafka")
"""Faults that need no worker."""
RESTART_S = 0.3
SAMPLE_S = 0.2
MAX_ORPHANED_SAMPLES = 3


@dataclass(slots=True)
class Node:
    """One worker process at a time; a new one takes the place of one that ended."""

    index: int
    process: Process
    worker: SimWorker
    task: "asyncio.Task[None]"
    is_stopping: bool = False
    num_orphaned: int = 0
    """Samples in a row in which it had requests and no job."""


@dataclass(slots=True)
class Outcome:
    seed: int
    violations: list[str]
    trace: list[str]
    num_callbacks: int
    ended_s: float
    counts: dict[str, int] = field(default_factory=dict)


class World:
    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.loop = VirtualLoop()
        self.seed = seed
        self.trace: list[str] = []
        self._traced = traced
        self.rng = random.Random(seed)
        self.plan: Plan = make_plan(self.rng)
        self.workload: Workload = make_workload(self.rng, self.plan.chaos_s)
        self.network = Network(self.loop, self.rng)
        self.ownership = Ownership(self.plan.weather.max_late_s)
        self.auditor = Auditor(
            self.workload,
            (RESULTS, LETTERS),
            self.ownership,
            self.loop.time,
            self.note if traced else _ignore,
            forgets=self.plan.forgets,
        )
        self.redis = RedisServer(self.loop, self.auditor, clock_offset_s=self.rng.choice((0.0, 5.0, -5.0)))
        self.broker = Broker(self.loop, self.auditor, TOPICS)
        self.group = Group(self.loop, self.rng, self.broker, JOBS, self.ownership, self.note)
        self.cluster = Cluster(self.network, self.broker, self.group)
        self.nodes: list[Node] = []
        self.counts: dict[str, int] = {}
        self._incarnations = 0
        self._is_closing = False
        self._gone: list[Process] = []
        self._kept: list[Any] = []
        """Tasks of dead processes: collecting them in the middle of the schedule would run their `finally` blocks."""

    def note(self, text: str) -> None:
        if self._traced:
            self.trace.append(f"{self.loop.now_s:10.6f} {text}")

    def run(self, control: AbstractContextManager[None] | None = None) -> Outcome:
        asyncio.set_event_loop(None)
        self.loop.set_exception_handler(self._unhandled)
        around = Surroundings(self.loop, self.network, self.cluster, self.redis)
        with (
            VirtualTime(self.loop),
            replaced(around),
            logs_to(self._log if self._traced else None),
            control or contextlib.nullcontext(),
        ):
            try:
                self.loop.run_until_complete(self.loop.create_task(self._drive(), context=self.loop.neutral))
            except StuckError as error:
                self.auditor.report("G8", str(error))
            outcome = Outcome(
                self.seed, self.auditor.violations, self.trace, self.loop.num_callbacks, self.loop.now_s, self.counts
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
        for index in range(plan.num_workers):
            self._start(index)
        for submission in self.workload.submissions:
            loop.at(submission.at_s, self._submit, submission)
        for job_id, at_s in self.workload.cancels.items():
            loop.at(max(0.0, at_s), self._cancel, job_id)
        for fault in plan.faults:
            loop.at(fault.at_s, self._inject, fault)
        loop.later(SAMPLE_S, self._sample)
        await asyncio.sleep(plan.chaos_s)
        self._heal()
        while not self._settled():
            await asyncio.sleep(0.25)
            if loop.now_s > plan.chaos_s + SETTLE_LIMIT_S:
                self._report_unsettled()
                break
        else:
            await self._rest()
        self.auditor.finish()
        if plan.drained:
            await self._drain_all()

    # Workers

    def _start(self, index: int) -> None:
        if self._is_closing:
            return
        self._incarnations += 1
        process = Process(f"w{index}.{self._incarnations}", self.plan.clock_offsets_s[index])
        context = context_of(process)
        self.note(f"start {process}")
        worker = SimWorker(process.name, self.network, self.plan.mean_step_s)
        task = self.loop.create_task(worker.run(), context=context)
        node = Node(index, process, worker, task)
        task.add_done_callback(partial(self._ended, node), context=self.loop.neutral)
        self.nodes.append(node)

    def _ended(self, node: Node, task: "asyncio.Task[None]") -> None:
        if self._is_closing:
            if not task.cancelled():
                task.exception()
            return
        self.nodes.remove(node)
        self._gone.append(node.process)
        error = None if task.cancelled() else task.exception()
        self.note(f"{node.process} ended: {error!r}")
        if isinstance(error, SettingsError) and self.plan.foreign_claim_s:
            self.counts["foreign_claims"] = self.counts.get("foreign_claims", 0) + 1
        elif error is not None or task.cancelled():
            self.auditor.report("G9", f"{node.process} ended by itself: {error!r}")
        self.loop.later(RESTART_S, self._start, node.index)

    def _node(self, index: int) -> Node | None:
        running = [node for node in self.nodes if node.index == index and not node.is_stopping]
        return next((node for node in running if node.process.state is State.RUNNING), None)

    # Faults

    def _inject(self, fault: Fault) -> None:
        node = self._node(fault.worker)
        self.note(f"fault {fault.kind} {node and node.process} {fault.seconds:.3f} s")
        if node is not None or fault.kind in OF_SERVERS:
            self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
            self.ownership.disturbed_until(self.loop.now_s + fault.seconds)
            getattr(self, fault.kind)(node, fault.seconds)

    def kill_worker(self, node: Node, seconds: float) -> None:
        self.loop.kill(node.process)
        self.nodes.remove(node)
        self._gone.append(node.process)
        self._kept.append(asyncio.all_tasks(self.loop))
        self.network.close_all(node.process)
        self.loop.later(min(seconds, 2.0), self._start, node.index)

    def freeze_worker(self, node: Node, seconds: float) -> None:
        self.loop.freeze(node.process)
        self.loop.later(seconds, self._resume, node)

    def _resume(self, node: Node) -> None:
        if node.process.state is State.FROZEN:
            self.note(f"resume {node.process}")
            self.loop.resume(node.process)

    def drain_worker(self, node: Node, seconds: float) -> None:
        node.is_stopping = True
        self.loop.call_soon(node.worker.stop, context=context_of(node.process))

    def isolate_worker(self, node: Node, seconds: float) -> None:
        self.cut_from_redis(node, seconds)
        self.cut_from_kafka(node, seconds)

    def cut_from_redis(self, node: Node, seconds: float) -> None:
        self.network.hold(node.process, REDIS, seconds)

    def cut_from_kafka(self, node: Node, seconds: float) -> None:
        self.network.hold(node.process, KAFKA, seconds)

    def break_connections(self, node: Node, seconds: float) -> None:
        self.network.break_all(REDIS)
        self.network.break_all(KAFKA)

    def restart_redis(self, node: Node | None, seconds: float) -> None:
        self.redis.restart()
        self.network.stop_server(REDIS)
        self.loop.later(min(seconds, 2.0), self.network.start_server, REDIS)

    def restart_redis_empty(self, node: Node | None, seconds: float) -> None:
        self.redis.forget()
        self.restart_redis(node, seconds)

    def flush_redis(self, node: Node | None, seconds: float) -> None:
        self.redis.forget()

    def evict_key(self, node: Node | None, seconds: float) -> None:
        keys = self.redis.keys()
        if keys:
            self.redis.evict(self.rng.choice(keys))

    def refuse_writes(self, node: Node | None, seconds: float) -> None:
        share = self.rng.choice((0.1, 0.5, 1.0))
        self.redis.refuses = lambda: self.rng.random() < share
        self.loop.later(min(seconds, 2.0), self._accept_writes)

    def _accept_writes(self) -> None:
        self.redis.refuses = None

    def stop_kafka(self, node: Node | None, seconds: float) -> None:
        self.network.stop_server(KAFKA)
        self.loop.later(min(seconds, 2.0), self.network.start_server, KAFKA)

    def _heal(self) -> None:
        self.note("the faults have ended")
        self.network.heal()
        self._accept_writes()
        for node in self.nodes:
            self._resume(node)

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

    def _settled(self) -> bool:
        return all(
            self.auditor.is_terminal(submission) and self.auditor.is_covered(submission)
            for submission in self.workload.submissions
        ) and all(
            self.broker.commits.get(partition, (0, ""))[0] == log.end
            for partition, log in self.broker.logs.items()
            if partition[0] == JOBS
        )

    def _report_unsettled(self) -> None:
        for submission in self.workload.submissions:
            if not self.auditor.is_terminal(submission):
                self.auditor.report("G8", f"{submission.kind} {submission.job_id} does not end")
            elif not self.auditor.is_covered(submission):
                self.auditor.report("G8", f"{submission.kind} {submission.job_id} is never committed")
        for partition, log in self.broker.logs.items():
            committed = self.broker.commits.get(partition, (0, ""))[0]
            if partition[0] == JOBS and committed != log.end:
                self.auditor.report("G8", f"the commit of {partition} stays at {committed} of {log.end}")

    async def _rest(self) -> None:
        """Waits until no worker holds anything, and all are in the group and nothing else is."""
        limit_s = self.loop.now_s + REST_LIMIT_S
        while True:
            await asyncio.sleep(0.25)
            left = {str(node.process): leaks for node in self.nodes if (leaks := _leaks_of(node))}
            members = sorted(member.rpartition("-")[0] for member in self.group.members)
            in_group = members == sorted(str(node.process) for node in self.nodes)
            complete = len(self.nodes) == self.plan.num_workers and self.group.phase is Phase.STABLE
            if not left and in_group and complete:
                return
            if self.loop.now_s > limit_s:
                self.auditor.report("G10", f"workers {[*map(str, self.nodes)]}, group {members}, kept: {left}")
                return

    def _sample(self) -> None:
        """Finds requests that run although their jobs are gone: for longer than the steps in flight."""
        for node in self.nodes:
            parts = node.worker.parts
            if parts is None or node.process.state is not State.RUNNING or len(parts.table):
                node.num_orphaned = 0
                continue
            node.num_orphaned += parts.engine.scheduler.has_work
            if node.num_orphaned == MAX_ORPHANED_SAMPLES:
                self.auditor.report("G7", f"{node.process} has no job and goes on with requests")
        if not self._is_closing:
            self.loop.later(SAMPLE_S, self._sample)

    async def _drain_all(self) -> None:
        self._is_closing = True
        self.note("drain")
        nodes = list(self.nodes)
        for node in nodes:
            self.loop.call_soon(node.worker.stop, context=context_of(node.process))
        if nodes:
            await asyncio.wait([node.task for node in nodes], timeout=DRAIN_LIMIT_S)
        for node in nodes:
            if not node.task.done():
                self.auditor.report("G11", f"{node.process} does not end its drain")
            elif node.task.exception() is not None:
                self.auditor.report("G11", f"the drain of {node.process} raised {node.task.exception()!r}")
        if self.group.members:
            self.auditor.report("G11", f"{', '.join(self.group.members)} did not leave the group")

    def _log(self, text: str) -> None:
        from tests.sim.loop import OWNER

        self.note(f"{OWNER.get()} {text}")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._is_closing:
            self.auditor.report("G9", f"{context['message']}: {context.get('exception')!r}")

    def _close(self) -> None:
        """Cancels everything, the tasks of dead processes too, so that no coroutine is left to the collector."""
        self._is_closing = self.network.over = True
        self.loop.num_callbacks_limit = None
        self.loop.bury([*self._gone, *(node.process for node in self.nodes)])
        for _ in range(5):
            tasks = asyncio.all_tasks(self.loop)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            waiting = self.loop.create_task(asyncio.wait(tasks, timeout=30.0), context=self.loop.neutral)
            self.loop.run_until_complete(waiting)
        self.loop.run_until_complete(self.loop.create_task(self.loop.shutdown_asyncgens()))
        self.loop.close()


def _leaks_of(node: Node) -> dict[str, int]:
    """What a worker holds although it has no job."""
    parts = node.worker.parts
    if parts is None:
        return {}
    stats = parts.engine.scheduler.stats()
    found = {
        "jobs in the table": len(parts.table),
        "ids in the table": len(parts.table._by_job_id),
        "tasks": len(parts.flow._tasks),
        "open streams": parts.publisher.num_open_jobs,
        "running requests": stats.num_running,
        "waiting requests": stats.num_waiting,
        "held blocks": stats.held_blocks,
        "lost blocks": NUM_BLOCKS - stats.free_blocks - stats.cached_blocks - stats.held_blocks,
        "sends in flight": parts.producer.stats().in_flight,
    }
    return {name: count for name, count in found.items() if count}


def _ignore(text: str) -> None:
    del text


def run_schedule(
    seed: int, *, traced: bool = False, control: Callable[[], AbstractContextManager[None]] | None = None
) -> Outcome:
    return World(seed, traced=traced).run(control() if control is not None else None)
