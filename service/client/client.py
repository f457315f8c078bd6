"""One connection to the service: a producer, the results topic and Redis."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.client.discover import client_settings
from service.client.lookup import ResultLookup, Seen, seen_before
from service.client.result_topic import FollowerStats, ResultFollower
from service.client.run_job import Finished, run_job
from service.connect import kafka_config, redis_client, stream_config
from service.errors import DependencyError
from service.ingest.kafka_clients import close_producer, make_producer, start_client
from service.ingest.topics import ensure_topics
from service.settings import Settings
from service.stream.assemble import StreamAssembler
from service.stream.control import request_cancel
from service.stream.keys import JobKeys
from service.stream.reader import Item, read_stream
from service.waiting import cancellation_kept
from service.wire import Result

LINGER_MS = 5
CONNECT_TIMEOUT_S = 10.0
RECHECK_S = 15.0


@dataclass(frozen=True, slots=True)
class ClientStats:
    """A snapshot of a Client; counters grow over its life."""

    num_published: int
    """Jobs that every in-sync replica has."""
    results: FollowerStats


class Client:
    """Publishes jobs, awaits results, follows streams, cancels. Use it as an async context manager on one event loop.

    Entering it connects, and creates the topics where they are missing. It raises DependencyError when Kafka or Redis
    does not answer within `CONNECT_TIMEOUT_S`. `service.client.testing.FakeClient` is its double for tests.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        bootstrap: str | None = None,
        redis_url: str | None = None,
        namespace: str | None = None,
        kafka: bool = True,
    ) -> None:
        """Takes `settings`, or what `client_settings` makes of the environment and the keywords.

        settings: complete settings. The keywords below go without them.
        bootstrap: Kafka brokers, `host:port`, comma separated.
        redis_url: `redis://host:port/database`, with user and password where Redis asks for them.
        namespace: what the service's keys in Redis begin with.
        kafka: False leaves Kafka alone; the client can then follow streams and cancel, not publish or await results.

        Raises SettingsError when a value is out of its limits or a certificate cannot be read, TypeError for settings
        together with an address.
        """
        if settings is None:
            settings = client_settings(bootstrap=bootstrap, redis_url=redis_url, namespace=namespace)
        elif (bootstrap, redis_url, namespace) != (None, None, None):
            raise TypeError("Client takes settings, or bootstrap, redis_url and namespace; not both")
        self.settings = settings
        self.config = kafka_config(settings, client_id="tailrace-client")
        self.redis: Redis = redis_client(settings)
        self.results = ResultFollower(self.config)
        self.lookup = ResultLookup(self.config)
        self._kafka = kafka
        self._producer: AIOKafkaProducer | None = None
        self._num_published = 0

    async def __aenter__(self) -> Self:
        try:
            await self._check_redis()
            if self._kafka:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self._connect_kafka()
        except (KafkaError, OSError, TimeoutError) as error:
            await self.close()
            raise DependencyError(
                f"Kafka at {self.settings.kafka_bootstrap} does not answer ({_reason(error)}); "
                "start one with `tailrace serve --embedded` or set TAILRACE_KAFKA_BOOTSTRAP"
            ) from error
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections in bounded time; futures of `expect` that still wait are cancelled."""
        await self.results.stop()
        if self._producer is not None:
            await close_producer(self._producer)
        await self.redis.aclose()

    def stats(self) -> ClientStats:
        return ClientStats(self._num_published, self.results.stats())

    async def publish(
        self, job_id: str, value: bytes, *, headers: tuple[tuple[str, bytes], ...] = ()
    ) -> None:
        """Publishes one job; returns when every in-sync replica has it.

        job_id: the record's key, equal to the job's `id`.
        value: the job as JSON. It is checked by the service, not here: a job that cannot be run gets a result too.
        headers: of the record; `traceparent` and `tracestate` come back with the result.

        Raises DependencyError when Kafka does not take the record, RuntimeError without a connection to Kafka.
        """
        if self._producer is None:
            raise RuntimeError("Client.publish needs `async with Client(...)`, and not kafka=False")
        try:
            with cancellation_kept():
                await self._producer.send_and_wait(
                    self.settings.jobs_topic, value, key=job_id.encode(), headers=list(headers)
                )
        except (KafkaError, OSError) as error:
            raise DependencyError(f"job {job_id} could not be published: {_reason(error)}") from error
        self._num_published += 1

    def expect(self, job_id: str) -> "asyncio.Future[Result]":
        """Returns a future of the job's result; call it before `publish`, and cancel it when it is not needed.

        The future ends in InternalError when the results topic cannot be read, for another reason than an unreachable
        broker.
        """
        return self.results.expect(job_id)

    async def run(
        self,
        job: Mapping[str, Any],
        *,
        verify_stream: bool = True,
        on_item: Callable[[Item], None] | None = None,
    ) -> Finished:
        """Publishes one job and waits for its outcome. Cancelling the call cancels the job.

        job: the fields of the job, with an `id`.
        verify_stream: read the whole stream and compare it with the result.
        on_item: called with each item of the stream as it arrives.

        A job that fails, is refused or expires is an outcome, not an exception: see `Finished.result.status`. Raises
        what `publish` and `result_of` raise, and KeyError for a job without `id`.
        """
        return await run_job(self, job, verify_stream=verify_stream, on_item=on_item)

    async def result_of(self, job_id: str, awaited: "asyncio.Future[Result] | None" = None) -> Result:
        """Waits for the result, however long the job takes; bound it with `asyncio.timeout`.

        awaited: the future of `expect`. Without it results are found that are published from now on, and earlier ones
        for as long as Redis remembers the job.

        It checks regularly whether the job ended before the future was made. Raises InternalError as the future does.
        """
        expected = awaited or self.expect(job_id)
        try:
            if awaited is None and (found := await self._result_before(job_id)) is not None:
                return found
            while not expected.done():
                await asyncio.wait({expected}, timeout=RECHECK_S)
                if not expected.done() and (found := await self._result_before(job_id)) is not None:
                    return found
            return expected.result()
        finally:
            if awaited is None:
                expected.cancel()

    async def seen(self, job_id: str, value: bytes) -> Seen:
        """Returns what Redis remembers of a job: never seen, running, ended, or another job under the same id.

        value: the job as it was, or would be, published.

        Redis forgets a job some time after its end (`stream_ttl_s`). Raises DependencyError when it does not answer.
        """
        try:
            with cancellation_kept():
                return await seen_before(self.redis, self.settings.namespace, job_id, value)
        except (RedisError, OSError) as error:
            raise DependencyError(f"job {job_id} could not be looked up: {_reason(error)}") from error

    def stream(
        self, job_id: str, assembler: StreamAssembler | None = None, *, idle_timeout_s: float | None = None
    ) -> AsyncGenerator[Item, None]:
        """Yields every event of the job once and in order, from the first one, whenever the reader joins; ends with a
        Verdict. Close it with `contextlib.aclosing` to leave early.

        job_id: a job that ran, runs or will run; an unknown one is waited for.
        assembler: kept up to date with the joined texts.
        idle_timeout_s: TimeoutError is raised after so many seconds without an event; None: never.

        A Redis that is away is waited for.
        """
        return read_stream(
            self.redis,
            job_id,
            assembler=assembler,
            idle_timeout_s=idle_timeout_s,
            config=stream_config(self.settings),
        )

    async def cancel(self, job_id: str) -> None:
        """Asks the worker that has the job, now or later, to cancel it; returns when Redis has the request.

        A job that has ended stays as it is. Raises DependencyError when Redis does not answer.
        """
        try:
            with cancellation_kept():
                await request_cancel(self.redis, job_id, namespace=self.settings.namespace)
        except (RedisError, OSError) as error:
            raise DependencyError(f"job {job_id} could not be cancelled: {_reason(error)}") from error

    async def _result_before(self, job_id: str) -> Result | None:
        """Returns the result of a job that has ended; None while Redis or Kafka does not answer."""
        try:
            key = JobKeys.of(job_id, self.settings.namespace).meta
            with cancellation_kept():
                ended = await self.redis.hget(key, "ended")
            if ended is None:
                return None
            with cancellation_kept():
                return await self.lookup.find(job_id)
        except (RedisError, KafkaError, OSError, TimeoutError):
            return None

    async def _check_redis(self) -> None:
        try:
            await self.redis.ping()
        except (RedisError, OSError) as error:
            raise DependencyError(
                f"Redis at {self.settings.redis_url_masked} does not answer ({_reason(error)}); "
                "start one with `tailrace serve --embedded` or set TAILRACE_REDIS_URL"
            ) from error

    async def _connect_kafka(self) -> None:
        await ensure_topics(self.config)
        self._producer = make_producer(self.config, linger_ms=LINGER_MS)
        await start_client(self._producer)
        await self.results.start()


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
