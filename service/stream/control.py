"""Cancellation: a key that outlives the request, and a channel that makes it quick."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

from redis.asyncio import Redis

from service.stream.backoff import Backoff
from service.stream.cancellation import cancellation_kept
from service.stream.config import StreamConfig
from service.stream.keys import CONTROL_CHANNEL, JobKeys
from service.stream.link import UNAVAILABLE
from service.stream.subscription import Sign, subscription

_BATCH = 512


async def request_cancel(redis: Redis, job_id: str, *, ttl_s: int = 3600) -> None:
    """Ask whoever has the job, now or later, to cancel it.

    The key comes first: a worker that misses the message finds the key when it opens the job.
    """
    await redis.set(JobKeys.of(job_id).cancel, "1", ex=ttl_s)
    await redis.publish(CONTROL_CHANNEL, job_id)


class CancelListener:
    """Tells `on_cancel` the ids of jobs to cancel, this worker's or not, perhaps more than once.

    After every subscription the keys of `active()` are looked up, for requests made while nobody listened.
    """

    def __init__(
        self,
        config: StreamConfig,
        on_cancel: Callable[[str], None],
        active: Callable[[], Iterable[str]],
    ) -> None:
        self._config = config
        self._on_cancel = on_cancel
        self._active = active
        self._redis = Redis.from_url(
            config.url,
            socket_timeout=config.command_timeout_s,
            socket_connect_timeout=config.connect_timeout_s,
            client_name="tailrace-control",
        )
        self.listening = asyncio.Event()
        """Set once the first subscription stands."""

    async def run(self) -> None:
        """For ever; cancel it to stop. A Redis that is away is waited for."""
        backoff = Backoff(self._config, "redis_control_lost")
        try:
            while True:
                try:
                    await self._listen(backoff)
                except UNAVAILABLE as error:
                    await asyncio.sleep(backoff.failed(error))
        finally:
            await self._redis.aclose()

    async def _listen(self, backoff: Backoff) -> None:
        async with aclosing(subscription(self._redis, CONTROL_CHANNEL, self._config)) as items:
            async for item in items:
                if item is Sign.CONFIRMED:
                    for job_id in await self.cancelled(list(self._active())):
                        self._on_cancel(job_id)
                    backoff.succeeded()
                    self.listening.set()
                elif isinstance(item, bytes):
                    self._on_cancel(item.decode(errors="replace"))

    async def cancelled(self, job_ids: Sequence[str]) -> list[str]:
        """Those of `job_ids` whose cancellation was requested. Raises RedisError when Redis is away.

        One key per command, pipelined: the keys of different jobs live in different cluster slots.
        """
        found: list[str] = []
        for begin in range(0, len(job_ids), _BATCH):
            batch = job_ids[begin : begin + _BATCH]
            with cancellation_kept():
                async with self._redis.pipeline(transaction=False) as pipe:
                    for job_id in batch:
                        pipe.exists(JobKeys.of(job_id).cancel)
                    replies = await pipe.execute()
            found += [job_id for job_id, there in zip(batch, replies, strict=True) if there]
        return found
