"""Runs many faults with many seeds, several at a time, on servers that they share or have for themselves."""

import asyncio
import shutil
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness.invariants import Texts, Violation
from tests.faults.harness.runs import Fault, Outcome, expected_texts, run_once
from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer, new_server

Servers = tuple[KafkaBroker, RedisServer]


@dataclass(frozen=True, slots=True)
class Task:
    fault: Fault
    seed: int
    without: Sequence[str] = ()


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
        servers = KafkaBroker(folder / "kafka"), new_server(folder / "redis")
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

    async def run(self, tasks: Sequence[Task], report: Callable[[Task, Outcome], None]) -> list[Outcome]:
        """Runs all; calls `report` as each ends. A run that breaks down is a violation of its own."""

        async def one(task: Task) -> Outcome:
            async with self._slots:
                outcome = await self._one(task)
                report(task, outcome)
                return outcome

        return list(await asyncio.gather(*(one(task) for task in tasks)))

    async def _one(self, task: Task) -> Outcome:
        self._num_runs += 1
        folder = self._folder / f"run-{self._num_runs}"
        options = {"end_limit_s": task.fault.control_limit_s} if task.without else {}
        try:
            if task.fault.own_servers:
                async with self._pool.private() as servers:
                    outcome = await run_once(
                        task.fault, task.seed, folder, servers, self._texts, without=task.without, **options
                    )
            else:
                outcome = await run_once(
                    task.fault,
                    task.seed,
                    folder,
                    await self._pool.shared(),
                    self._texts,
                    without=task.without,
                    **options,
                )
        except Exception:
            broken = Violation("the run itself", traceback.format_exc(limit=-4))
            outcome = Outcome(task.fault.name, task.seed, (broken,), 0, 0, (), 0.0)
        self._keep_some(folder, task, outcome)
        shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _keep_some(self, folder: Path, task: Task, outcome: Outcome) -> None:
        as_it_should = bool(outcome.violations) == bool(task.without)
        if self._keep is not None and not as_it_should and folder.exists():
            kept = self._keep / f"{task.fault.name}-{task.seed}{'-control' if task.without else ''}"
            shutil.copytree(folder, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("points"))
            (kept / "violations.txt").write_text("\n".join(map(str, outcome.violations)))
