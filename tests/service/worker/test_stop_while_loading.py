"""A worker that is told to stop before it serves."""

import asyncio

from service.settings import load_settings
from service.worker.worker import Worker


async def test_a_worker_stopped_while_it_loads_never_joins_the_group() -> None:
    """Nothing listens at these addresses: a worker that went on to serve would wait for them and for its drain."""
    settings = load_settings(
        {
            "TAILRACE_ENGINE": "deterministic",
            "TAILRACE_KAFKA_BOOTSTRAP": "127.0.0.1:1",
            "TAILRACE_REDIS_URL": "redis://127.0.0.1:1/0",
        }
    )
    worker = Worker(settings)
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0)
    worker.stop()
    await running
    assert worker.parts is None
    assert not worker.serving.is_set()
