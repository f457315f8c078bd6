"""Cancellation: a key that keeps the request, and a channel that makes it quick."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

from redis.asyncio import Redis

from service.stream.connection import UNAVAILABLE
from service.stream.keys import JobKeys, control_channel
from service.stream.stream_config import StreamConfig
from service.stream.subscription import Sign, subscription
from service.waiting import Backoff, cancellation_kept

CANCEL_TTL_S = 3_600
"""How long a request is kept for a worker that has yet to get the job."""
_BATCH = 512


async def request_cancel(redis: Redis, job_id: str, *, namespace: str, ttl_s: int = CANCEL_TTL_S) -> None:
    """Ask the worker that has the job, now or later, to cancel it.

    The key comes first: a worker that misses the message finds the key when it opens the job, and one that hears a
    message without a key of its own database ignores it.
    """
    await redis.set(JobKeys.of(job_id, namespace).cancel, "1", ex=ttl_s)
    await redis.publish(control_channel(namespace), job_id)


class CancelListener:
    """Tells `on_cancel` the ids of jobs to cancel, this worker's or not, perhaps more than once.

    After every subscription the keys of `active()` are looked up, for requests made while this worker was not
    subscribed.
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
            config.redis_url,
            socket_timeout=config.command_timeout_s,
            socket_connect_timeout=config.connect_timeout_s,
            client_name="tailrace-control",
        )
        self.listening = asyncio.Event()
        """Set while subscribed."""
        self.problem: str | None = None
        """Why the subscription failed; None: it did not, or was not tried yet."""

    async def run(self) -> None:
        """Listen until cancelled; waits while Redis is away."""
        backoff = self._config.backoff("redis_control_lost")
        try:
            while True:
                try:
                    await self._listen(backoff)
                except UNAVAILABLE as error:
                    self.listening.clear()
                    self.problem = str(error) or type(error).__name__
                    await asyncio.sleep(backoff.failed(error))
        finally:
            self.listening.clear()
            await self._redis.aclose()

    async def _listen(self, backoff: Backoff) -> None:
        async with aclosing(
            subscription(self._redis, control_channel(self._config.namespace), self._config)
        ) as items:
            async for item in items:
                if item is Sign.CONFIRMED:
                    await self._tell(list(self._active()))
                    backoff.succeeded()
                    self.problem = None
                    self.listening.set()
                elif isinstance(item, bytes):
                    # The channel is heard in all databases of the server; the key is in one.
                    await self._tell([item.decode(errors="replace")])

    async def _tell(self, job_ids: Sequence[str]) -> None:
        for job_id in await self.cancelled(job_ids):
            self._on_cancel(job_id)

    async def cancelled(self, job_ids: Sequence[str]) -> list[str]:
        """Return those of `job_ids` whose cancellation was requested. Raises RedisError when Redis is away.

        One key per command, pipelined: the keys of different jobs live in different cluster slots.
        """
        found: list[str] = []
        for begin in range(0, len(job_ids), _BATCH):
            batch = job_ids[begin : begin + _BATCH]
            with cancellation_kept():
                async with self._redis.pipeline(transaction=False) as pipe:
                    for job_id in batch:
                        pipe.exists(JobKeys.of(job_id, self._config.namespace).cancel)
                    replies = await pipe.execute()
            found += [job_id for job_id, there in zip(batch, replies, strict=True) if there]
        return found
