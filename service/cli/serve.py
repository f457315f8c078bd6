"""`tailrace serve`: a worker, and with --embedded its Kafka and Redis."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog

from service.client.discover import client_settings
from service.embedded.stack import EmbeddedStack
from service.errors import DependencyError
from service.log import configure_logging
from service.settings import Settings, load_settings

log = structlog.get_logger(__name__)


def serve(*, embedded: bool) -> None:
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
    """Call `stop` on SIGTERM and Ctrl-C, from now until the loop ends or another takes its place."""
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
    """The same settings, at this pair's addresses."""
    return settings.model_copy(update={"kafka_bootstrap": pair.kafka_bootstrap, "redis_url": pair.redis_url})


async def run_worker(settings: Settings, failed: "asyncio.Task[str] | None" = None) -> None:
    """Until SIGTERM or Ctrl-C; the second of them does not wait for running jobs.

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
