"""One worker process: loads, serves until told to stop, drains."""

import asyncio
import os
import socket
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from kernels.weights.source import resolve_model
from service.admin import AdminServer, watch_loop_lag
from service.engine import start_step_thread
from service.errors import InternalError
from service.grammar import load_grammars
from service.metrics import Metrics
from service.settings import Settings
from service.text.load import load_tokenizer
from service.worker.assembly import Loaded, Parts, assemble, end_token_ids
from service.worker.readiness import Readiness
from service.worker.specs import TextLanes

log = structlog.get_logger(__name__)

HANDBACK_S = 5.0
"""Part of the drain's grace period reserved for the last commit and for leaving the group."""


class Worker:
    """Loads, serves and drains, once. `run` returns after a drain and raises when the model cannot be loaded or a
    part fails."""

    def __init__(self, settings: Settings, metrics: Metrics | None = None) -> None:
        self._settings = settings
        self.name = settings.worker_id or f"{socket.gethostname()}:{os.getpid()}"
        self.metrics = metrics or Metrics()
        self.readiness = Readiness()
        self.serving = asyncio.Event()
        """Set once all parts run; Kafka and Redis may still be away."""
        self.parts: Parts | None = None
        """Once serving; for benches and tests that look inside."""
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._closing = False
        self._failure: Exception | None = None

    def stop(self) -> None:
        """Drain and stop (SIGTERM). A second call hands back running jobs at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self) -> None:
        settings = self._settings
        if not settings.admin_port:
            await self._load_and_serve()
            return
        async with AdminServer(
            settings.admin_host,
            settings.admin_port,
            registry=self.metrics.registry,
            health=self.readiness.health,
            ready=self.readiness.reasons,
        ):
            await self._load_and_serve()

    async def _load_and_serve(self) -> None:
        with (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="text") as text_executor,
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-text") as long_text_executor,
        ):
            loaded = await self._load(text_executor)
            try:
                if self._stop.is_set():
                    log.info("stopped_while_loading", worker=self.name)
                    return
                lanes = TextLanes(text_executor, long_text_executor)
                parts = assemble(self._settings, loaded, self.metrics, lanes, worker=self.name)
                await self._serve(parts)
            finally:
                await loaded.step_thread.stop()

    async def _load(self, text_executor: ThreadPoolExecutor) -> Loaded:
        settings = self._settings
        source = None if settings.engine == "deterministic" else resolve_model(settings.model)
        served_name = settings.served_model_name or (
            "deterministic" if source is None else source.served_name
        )
        log.info("loading_model", model=served_name, worker=self.name)
        tokenizer_loading = asyncio.get_running_loop().run_in_executor(
            text_executor, load_tokenizer, None if source is None else source.path
        )
        step_thread, runner = await start_step_thread(settings)
        try:
            tokenizer = await tokenizer_loading
            grammars = await asyncio.get_running_loop().run_in_executor(
                text_executor, load_grammars, tokenizer, end_token_ids(runner, tokenizer), runner.vocab_size
            )
            if grammars is not None:
                runner.constrain_with(grammars)
            return Loaded(step_thread, runner, tokenizer, served_name, grammars)
        except BaseException:
            await step_thread.stop()
            raise

    async def _serve(self, parts: Parts) -> None:
        """Return after a drain. If a part ends by itself, close the others and raise its error."""
        self.parts = parts
        self.readiness.watch(parts)
        async with asyncio.TaskGroup() as group:

            def start(work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
                return group.create_task(self._supervised(work, name), name=name)

            # These end when their part is stopped.
            stopping = [
                start(parts.engine.run(), "engine"),
                start(parts.publisher.run(), "publisher"),
                start(parts.producer.run(), "producer"),
                start(parts.consumer.run(), "consumer"),
            ]
            # These run until they are cancelled.
            endless = [
                start(parts.listener.run(), "cancel-listener"),
                start(parts.claim.run(), "namespace-claim"),
                start(parts.flow.run(), "job-flow"),
                start(parts.observer.run(parts.wall_clock), "observer"),
                start(watch_loop_lag(self.metrics.loop_lag.observe), "loop-lag"),
            ]
            self._log_serving(parts)
            self.serving.set()
            try:
                await self._stop.wait()
                if self._failure is None:
                    await self._drain(parts)
            finally:
                await self._close(parts, stopping, endless)
        if self._failure is not None:
            raise self._failure

    async def _supervised(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Stop the worker when a part ends by itself; the others are closed in order."""
        failure: Exception | None = None
        try:
            await work
        except Exception as error:
            failure = error
        if not self._closing:
            self.readiness.broken = f"part {name} ended"
            self._failure = failure or InternalError(f"part {name} of the worker ended by itself")
            self._hurry.set()
            self._stop.set()
        elif failure is not None:
            log.warning("part_failed_while_closing", part=name, error=repr(failure))

    def _log_serving(self, parts: Parts) -> None:
        config = parts.engine.scheduler.config
        log.info(
            "serving",
            worker=self.name,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
        )

    async def _drain(self, parts: Parts) -> None:
        """Finish what fits into the grace period; other jobs stay incomplete, so another worker gets them."""
        self.readiness.draining = True
        grace_s = max(0.0, self._settings.drain_grace_s - HANDBACK_S)
        log.info("draining", num_jobs=len(parts.table), grace_s=grace_s)
        await parts.consumer.stop()
        waits = [asyncio.create_task(parts.table.when_empty()), asyncio.create_task(self._hurry.wait())]
        try:
            await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        log.info("drained", num_handed_back=len(parts.table))

    async def _close(
        self, parts: Parts, stopping: "list[asyncio.Task[None]]", endless: "list[asyncio.Task[None]]"
    ) -> None:
        """Commit, leave the group and stop every part. Bounded by the parts' own timeouts."""
        self._closing = True
        parts.flow.abandon_all()
        await parts.consumer.close(HANDBACK_S)
        parts.publisher.stop()
        parts.engine.stop()
        await parts.flow.close()
        await parts.grammars.close()
        await parts.producer.stop(HANDBACK_S)
        for task in endless:
            task.cancel()
        _, pending = await asyncio.wait([*stopping, *endless], timeout=HANDBACK_S)
        for task in pending:
            log.warning("part_did_not_end", part=task.get_name())
            task.cancel()
