"""A whole service inside one process, for the demo and the benches: nothing can outlive it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.cli.serve import on_embedded
from service.embedded.stack import EmbeddedStack
from service.errors import DependencyError
from service.settings import Settings
from service.worker.worker import Worker


@asynccontextmanager
async def local_service(settings: Settings) -> AsyncIterator[tuple[Settings, Worker]]:
    """Embedded pair and worker until the block ends; yields the settings that reach them.

    Raises DependencyError when one of them ends by itself.
    """
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
