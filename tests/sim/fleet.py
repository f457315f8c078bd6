"""The workers of a schedule: started, killed, frozen, drained, and examined for what they should not hold any more."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from service.errors import SettingsError
from tests.sim.faults import Plan
from tests.sim.loop import Process, State, VirtualLoop, context_of
from tests.sim.network import Network
from tests.sim.worker import NUM_BLOCKS, SimWorker

RESTART_S = 0.3
SAMPLE_S = 0.2
MAX_ORPHANED_SAMPLES = 3
"""Longer than the steps in flight take."""
DRAIN_LIMIT_S = 15.0
"""A drain's grace period and the time to hand back."""


@dataclass(slots=True)
class Node:
    """One worker process; another one takes its place when it ends."""

    index: int
    process: Process
    worker: SimWorker
    task: "asyncio.Task[None]"
    is_stopping: bool = False
    num_orphaned: int = 0
    """Samples in a row in which it had requests and no job."""

    def leaks(self) -> dict[str, int]:
        """What it holds; nothing, when it has no job."""
        parts = self.worker.parts
        if parts is None:
            return {}
        stats = parts.engine.scheduler.stats()
        found = {
            "jobs in the table": len(parts.table),
            "ids in the table": len(parts.table._by_job_id),
            "tasks": len(parts.flow._tasks),
            "open streams": parts.publisher.stats().open_jobs,
            "running requests": stats.num_running,
            "waiting requests": stats.num_waiting,
            "held blocks": stats.held_blocks,
            "lost blocks": NUM_BLOCKS - stats.free_blocks - stats.cached_blocks - stats.held_blocks,
            "sends in flight": parts.producer.stats().in_flight,
        }
        return {name: count for name, count in found.items() if count}


class Fleet:
    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        plan: Plan,
        report: Callable[[str, str], None],
        note: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._network = network
        self._plan = plan
        self._report = report
        self._note = note
        self.nodes: list[Node] = []
        self.num_refused = 0
        """Workers that found another deployment in the namespace and stopped."""
        self.is_closing = False
        self._num_started = 0
        self._gone: list[Process] = []
        self._kept: list[Any] = []
        """Tasks of dead processes: collecting them in the middle of the schedule would run their `finally` blocks."""

    def start_all(self) -> None:
        for index in range(self._plan.num_workers):
            self._start(index)
        self._loop.later(SAMPLE_S, self._sample)

    @property
    def names(self) -> list[str]:
        return sorted(str(node.process) for node in self.nodes)

    @property
    def is_complete(self) -> bool:
        return len(self.nodes) == self._plan.num_workers

    def running(self, index: int) -> Node | None:
        found = [node for node in self.nodes if node.index == index and not node.is_stopping]
        return next((node for node in found if node.process.state is State.RUNNING), None)

    def kill(self, node: Node, restart_s: float) -> None:
        self._loop.kill(node.process)
        self.nodes.remove(node)
        self._gone.append(node.process)
        self._kept.append(asyncio.all_tasks(self._loop))
        self._network.close_all(node.process)
        self._loop.later(restart_s, self._start, node.index)

    def freeze(self, node: Node, seconds: float) -> None:
        self._loop.freeze(node.process)
        self._loop.later(seconds, self._resume, node)

    def resume_all(self) -> None:
        for node in self.nodes:
            self._resume(node)

    def drain(self, node: Node) -> None:
        node.is_stopping = True
        self._loop.call_soon(node.worker.stop, context=context_of(node.process))

    async def drain_all(self) -> None:
        """Drains all; each must end by itself in time."""
        self.is_closing = True
        nodes = list(self.nodes)
        for node in nodes:
            self.drain(node)
        if nodes:
            await asyncio.wait([node.task for node in nodes], timeout=DRAIN_LIMIT_S)
        for node in nodes:
            if not node.task.done():
                self._report("G11", f"{node.process} does not end its drain")
            elif node.task.exception() is not None:
                self._report("G11", f"the drain of {node.process} raised {node.task.exception()!r}")

    def bury(self) -> None:
        """Lets the tasks of all processes run once more, to be cancelled."""
        self.is_closing = True
        self._loop.bury([*self._gone, *(node.process for node in self.nodes)])

    def _start(self, index: int) -> None:
        if self.is_closing:
            return
        self._num_started += 1
        process = Process(f"w{index}.{self._num_started}", self._plan.clock_offsets_s[index])
        self._note(f"start {process}")
        worker = SimWorker(process.name, self._network, self._plan.mean_step_s)
        task = self._loop.create_task(worker.run(), context=context_of(process))
        node = Node(index, process, worker, task)
        task.add_done_callback(partial(self._ended, node), context=self._loop.neutral)
        self.nodes.append(node)

    def _ended(self, node: Node, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if self.is_closing:
            return
        self.nodes.remove(node)
        self._gone.append(node.process)
        self._note(f"{node.process} ended: {error!r}")
        if isinstance(error, SettingsError) and self._plan.foreign_claim_s:
            self.num_refused += 1
        elif error is not None or not node.is_stopping:
            self._report("G9", f"{node.process} ended by itself: {error!r}")
        self._loop.later(RESTART_S, self._start, node.index)

    def _resume(self, node: Node) -> None:
        if node.process.state is State.FROZEN:
            self._note(f"resume {node.process}")
            self._loop.resume(node.process)

    def _sample(self) -> None:
        """Finds requests that run although their jobs are gone."""
        for node in self.nodes:
            parts = node.worker.parts
            if parts is None or node.process.state is not State.RUNNING or len(parts.table):
                node.num_orphaned = 0
                continue
            node.num_orphaned += parts.engine.scheduler.has_work
            if node.num_orphaned == MAX_ORPHANED_SAMPLES:
                self._report("G7", f"{node.process} has no job and goes on with requests")
        if not self.is_closing:
            self._loop.later(SAMPLE_S, self._sample)
