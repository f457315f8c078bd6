"""The load of the soak: users who each run one job of some kind after the other, and check how it ends."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from random import Random
from typing import Any

import orjson

from service.client import Client
from service.stream.assemble import StreamAssembler
from service.stream.control import request_cancel
from service.wire import Result

JOB_LIMIT_S = 120.0
CANCEL_TTL_S = 60
MAX_PROBLEMS = 20


class Load:
    """`ended` counts jobs by kind and status; `problems` are those that ended otherwise than they should."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._names = itertools.count()
        self.ended: Counter[str] = Counter()
        self.problems: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False

    @asynccontextmanager
    async def running(self, num_users: int) -> AsyncIterator[None]:
        self._tasks = [asyncio.create_task(self._user(Random(seed))) for seed in range(num_users)]
        try:
            yield
        finally:
            # Each user finishes its job, which is bounded: below a client a cancellation can get lost.
            self._leaving = True
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raises what a user failed with, and RuntimeError after too many problems."""
        for task in self._tasks:
            if task.done():
                task.result()
        if len(self.problems) >= MAX_PROBLEMS:
            raise RuntimeError("; ".join(self.problems[:5]))

    async def _user(self, rng: Random) -> None:
        kinds: dict[str, Callable[[Random, str], Awaitable[Result]]] = {
            "followed": self._followed,
            "unfollowed": self._unfollowed,
            "choices": self._choices,
            "cancelled": self._cancelled,
            "cancelled_early": self._cancelled_early,
            "refused": self._refused,
            "unreadable": self._unreadable,
            "repeated": self._repeated,
        }
        weights = (4, 3, 2, 2, 1, 1, 1, 1)
        while not self._leaving:
            kind = rng.choices(list(kinds), weights)[0]
            async with asyncio.timeout(JOB_LIMIT_S):
                result = await kinds[kind](rng, f"{kind}-{next(self._names)}")
            self.ended[f"{kind} {result.status}"] += 1
            wanted = {"refused": "rejected", "unreadable": "failed"}.get(kind, "completed")
            if result.status != wanted and not (
                kind.startswith("cancelled") and result.status == "cancelled"
            ):
                self.problems.append(f"{result.id} ended as {result.status}: {result.error}")

    async def _run(self, job_id: str, value: bytes) -> Result:
        awaited = self._client.expect(job_id)
        try:
            await self._client.publish(job_id, value)
            return await self._client.result_of(job_id, awaited)
        finally:
            awaited.cancel()

    def _job(self, rng: Random, job_id: str, **fields: Any) -> bytes:
        prompt = "x" * rng.choice((5, 50, 500))
        job = {"id": job_id, "prompt": prompt, "max_tokens": rng.choice((1, 10, 40, 100)), "ignore_eos": True}
        return orjson.dumps(job | fields)

    async def _followed(self, rng: Random, job_id: str) -> Result:
        assembler = StreamAssembler(job_id)
        run = asyncio.create_task(self._run(job_id, self._job(rng, job_id, logprobs=rng.choice((None, 3)))))
        try:
            async with aclosing(self._client.stream(job_id, assembler)) as items:
                async for _ in items:
                    pass
            result = await run
        finally:
            run.cancel()
        if assembler.problems() or assembler.texts() != [choice.text for choice in result.choices]:
            self.problems.append(f"{job_id}: its stream differs from its result: {assembler.problems()}")
        return result

    async def _unfollowed(self, rng: Random, job_id: str) -> Result:
        fields = {
            "stream": rng.random() < 0.5,
            "stop": ["zq", "q" * 50],
            "deadline": 600,
            "metadata": {"k": job_id},
        }
        return await self._run(job_id, self._job(rng, job_id, **fields))

    async def _choices(self, rng: Random, job_id: str) -> Result:
        return await self._run(job_id, self._job(rng, job_id, n=rng.choice((2, 4, 8)), temperature=1))

    async def _cancelled(self, rng: Random, job_id: str) -> Result:
        run = asyncio.create_task(self._run(job_id, self._job(rng, job_id, max_tokens=400)))
        try:
            wanted = rng.randrange(2, 20)
            async with aclosing(self._client.stream(job_id)) as items:
                async for _ in items:
                    wanted -= 1
                    if not wanted:
                        break
            await self._cancel(job_id)
            return await run
        finally:
            run.cancel()

    async def _cancelled_early(self, rng: Random, job_id: str) -> Result:
        await self._cancel(job_id)
        return await self._run(job_id, self._job(rng, job_id))

    async def _cancel(self, job_id: str) -> None:
        namespace = self._client.settings.namespace
        await request_cancel(self._client.redis, job_id, namespace=namespace, ttl_s=CANCEL_TTL_S)

    async def _refused(self, rng: Random, job_id: str) -> Result:
        bad: dict[str, Any] = rng.choice(({"temperature": 9}, {"tempature": 1}, {"max_tokens": 0}, {"n": 17}))
        return await self._run(job_id, self._job(rng, job_id, **bad))

    async def _unreadable(self, rng: Random, job_id: str) -> Result:
        return await self._run(job_id, rng.choice((b"{", b"\xff", b"[1]", b"x" * 5000)))

    async def _repeated(self, rng: Random, job_id: str) -> Result:
        value = self._job(rng, job_id)
        result = await self._run(job_id, value)
        await self._client.publish(job_id, value)
        return result
