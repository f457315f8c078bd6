"""Runs many faults with many seeds, several at a time, on servers that they share or have for themselves."""

import asyncio
import math
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness.catalogue import FAULTS
from tests.faults.harness.directed import CONTROLS, Scene, all_scenes, play
from tests.faults.harness.invariants import Texts, Violation
from tests.faults.harness.runs import Fault, Outcome, expected_texts, run_once
from tests.support.kafka import KafkaBroker
from tests.support.redis import OLDEST_REDIS, VERSIONS, RedisServer, free_port, new_server

Servers = tuple[KafkaBroker, RedisServer]


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a fault or of a scene."""

    name: str
    seed: int
    perform: Callable[[Path, Servers, Texts], Awaitable[Outcome]]
    own_servers: bool = False
    without: str = ""
    """The mechanism that is switched off; the run should then find a violation."""


def fault_task(fault: Fault, seed: int, *, control: bool = False) -> Task:
    async def perform(folder: Path, servers: Servers, texts: Texts) -> Outcome:
        if not control:
            return await run_once(fault, seed, folder, servers, texts)
        limit_s = fault.limit_s
        return await run_once(
            fault, seed, folder, servers, texts, without=[fault.control], end_limit_s=limit_s
        )

    return Task(fault.name, seed, perform, fault.own_servers, fault.control if control else "")


def scene_task(scene: Scene, *, without: str = "") -> Task:
    async def perform(folder: Path, servers: Servers, texts: Texts) -> Outcome:
        return await play(scene, folder, servers, texts, without=[without] if without else [])

    return Task(scene.name, 0, perform, without=without)


QUICK_SCENES = 24
QUICK_CONTROLS = ("fence", "decided outcome")


def quick_tasks(seed: int) -> list[Task]:
    """Each fault once, a part of the directed search that the seed chooses, and proof that the judge can say no."""
    scenes = random.Random(seed).sample(all_scenes(), QUICK_SCENES)
    return [
        *(fault_task(fault, seed) for fault in sorted(FAULTS.values(), key=lambda each: -each.limit_s)),
        *(scene_task(scene) for scene in scenes),
        *(scene_task(Scene(*CONTROLS[name]), without=name) for name in QUICK_CONTROLS),
    ]


class ServerPool:
    """One pair that many runs share, and pairs that a run has for itself; started when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared: Servers | None = None
        self._free: list[Servers] = []
        self._all: list[Servers] = []
        self._lock = asyncio.Lock()

    async def shared(self) -> Servers:
        async with self._lock:
            if self._shared is None:
                self._shared = await asyncio.to_thread(self._start)
            return self._shared

    @asynccontextmanager
    async def private(self) -> AsyncIterator[Servers]:
        async with self._lock:
            servers = self._free.pop() if self._free else await asyncio.to_thread(self._start)
        try:
            yield servers
        finally:
            if servers[0].running and servers[1].is_running():
                self._free.append(servers)

    def stop(self) -> None:
        for kafka, redis_server in self._all:
            kafka.stop()
            redis_server.stop()

    def _start(self) -> Servers:
        folder = self._folder / f"servers-{len(self._all)}"
        (folder / "kafka").mkdir(parents=True)
        (folder / "redis").mkdir()
        if self._shared is None:
            servers = KafkaBroker(folder / "kafka"), new_server(folder / "redis")
        else:
            installed = [each for each in VERSIONS if each != "6.2" or OLDEST_REDIS.exists()]
            version = installed[len(self._all) % len(installed)]
            kafka = KafkaBroker(folder / "kafka", proxied=(free_port(), free_port()))
            servers = kafka, new_server(folder / "redis", version)
        self._all.append(servers)
        servers[0].start()
        servers[1].start()
        return servers


class Suite:
    """Use as an async context manager."""

    def __init__(self, *, parallel: int, keep: Path | None = None) -> None:
        """`keep` is a folder for the ledgers and logs of runs that did not go as they should."""
        self._keep = keep
        self._folder = Path(tempfile.mkdtemp(prefix="tailrace-faults-"))
        self._pool = ServerPool(self._folder)
        self._slots = asyncio.Semaphore(parallel)
        self._num_runs = 0
        self._texts: Texts = {}

    async def __aenter__(self) -> "Suite":
        try:
            self._texts = await expected_texts(self._folder / "oracle", *await self._pool.shared())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._pool.stop)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def run(
        self, tasks: Sequence[Task], report: Callable[[Task, Outcome], None], *, limit_s: float = math.inf
    ) -> None:
        """Runs all; calls `report` as each ends, and begins none after `limit_s`.

        A run that breaks down is a violation of its own.
        """
        end_s = time.monotonic() + limit_s

        async def one(task: Task) -> None:
            async with self._slots:
                if time.monotonic() < end_s:
                    report(task, await self._one(task))

        await asyncio.gather(*(one(task) for task in tasks))

    async def _one(self, task: Task) -> Outcome:
        self._num_runs += 1
        folder = self._folder / f"run-{self._num_runs}"
        try:
            if task.own_servers:
                async with self._pool.private() as servers:
                    outcome = await task.perform(folder, servers, self._texts)
            else:
                outcome = await task.perform(folder, await self._pool.shared(), self._texts)
        except Exception:
            broken = Violation("the run itself", traceback.format_exc(limit=-4))
            outcome = Outcome(task.name, task.seed, (broken,), 0, 0, (), 0.0)
        self._keep_some(folder, task, outcome)
        shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _keep_some(self, folder: Path, task: Task, outcome: Outcome) -> None:
        as_it_should = bool(outcome.violations) == bool(task.without)
        if self._keep is not None and not as_it_should and folder.exists():
            kept = self._keep / f"{task.name}, seed {task.seed}{', control' if task.without else ''}"
            shutil.copytree(folder, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("points"))
            (kept / "violations.txt").write_text("\n".join(map(str, outcome.violations)))
