"""Runs a worker: `tailrace serve`, and a whole service inside one process for the demo and the benches."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from service.client.discover import client_settings
from service.embedded.stack import EmbeddedStack
from service.errors import DependencyError
from service.log import configure_logging
from service.settings import Settings, changed, load_settings

if TYPE_CHECKING:
    from service.worker.worker import Worker

log = structlog.get_logger(__name__)


def serve(*, embedded: bool) -> None:
    """Run a worker until a signal ends it. Raises SettingsError, KernelsError and DependencyError."""
    settings = load_settings() if embedded else client_settings()
    configure_logging(settings.log_level, settings.log_format)
    asyncio.run(_until_stopped(settings, embedded=embedded))


async def _until_stopped(settings: Settings, *, embedded: bool) -> None:
    task = asyncio.current_task()
    assert task is not None
    on_stop_signal(task.cancel)
    try:
        await _serve(settings, embedded=embedded)
    except asyncio.CancelledError:
        log.info("stopped_while_starting")


def on_stop_signal(stop: Callable[[], object]) -> None:
    """Call `stop` on SIGTERM and Ctrl-C until the loop ends or another call replaces it."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


async def _serve(settings: Settings, *, embedded: bool) -> None:
    async with AsyncExitStack() as stack:
        failed: asyncio.Task[str] | None = None
        if embedded:
            pair = await stack.enter_async_context(EmbeddedStack())
            log.info(
                "embedded_pair",
                kafka=pair.kafka_bootstrap,
                redis=pair.redis_url,
                note="in memory only: what is in them is gone when this command ends",
            )
            settings = on_embedded(settings, pair)
            failed = pair.failed
        await run_worker(settings, failed)


def on_embedded(settings: Settings, pair: EmbeddedStack) -> Settings:
    """Return the same settings with this pair's addresses."""
    return changed(settings, kafka_bootstrap=pair.kafka_bootstrap, redis_url=pair.redis_url)


async def run_worker(settings: Settings, failed: "asyncio.Task[str] | None" = None) -> None:
    """Run a worker until SIGTERM or Ctrl-C; the second signal does not wait for running jobs.

    Raises DependencyError when the embedded pair has `failed`.
    """
    from service.worker.worker import Worker

    worker = Worker(settings)
    on_stop_signal(worker.stop)
    running = asyncio.create_task(worker.run(), name="worker")
    await asyncio.wait({running} | ({failed} if failed else set()), return_when=asyncio.FIRST_COMPLETED)
    if failed is not None and failed.done() and not running.done():
        running.cancel()
        await asyncio.wait([running])
        raise DependencyError(failed.result())
    await running


@asynccontextmanager
async def local_service(settings: Settings) -> AsyncIterator[tuple[Settings, "Worker"]]:
    """Run an embedded pair and a worker until the block ends; yield the settings that reach them, and the worker.

    Nothing outlives this process. Raises DependencyError when the pair or the worker ends by itself.
    """
    from service.worker.worker import Worker

    async with EmbeddedStack(announce=False) as pair:
        settings = on_embedded(settings, pair)
        worker = Worker(settings)
        running = asyncio.create_task(worker.run(), name="worker")
        body = asyncio.current_task()
        assert body is not None
        broken: list[BaseException] = []

        def ended(task: "asyncio.Task[object]") -> None:
            if not stopping:
                error = None if task.cancelled() else task.exception()
                broken.append(error or DependencyError(f"{task.get_name()} ended by itself"))
                body.cancel()

        stopping = False
        for task in (running, pair.failed):
            task.add_done_callback(ended)
        try:
            serving = asyncio.create_task(worker.serving.wait())
            await asyncio.wait({serving, running}, return_when=asyncio.FIRST_COMPLETED)
            yield settings, worker
        except asyncio.CancelledError:
            if broken:
                body.uncancel()
                raise broken[0] from None
            raise
        finally:
            stopping = True
            worker.stop()
            worker.stop()
            await asyncio.wait({running})
