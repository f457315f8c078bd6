"""One connection to the service: a producer, the results topic and Redis."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import orjson
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.client.lookup import ResultLookup
from service.client.results import ResultFollower
from service.connect import kafka_config, redis_client, stream_config
from service.errors import DependencyError
from service.ingest.topics import ensure_topics
from service.settings import Settings
from service.stream.assemble import StreamAssembler
from service.stream.control import request_cancel
from service.stream.keys import JobKeys
from service.stream.reader import Item, Verdict, read_stream
from service.wire import Result

MAX_REQUEST_BYTES = 16 << 20
CONNECT_TIMEOUT_S = 10.0
RECHECK_S = 15.0
STREAM_TIMEOUT_S = 30.0
"""The end event follows the result within milliseconds; a stream without one for so long has none."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of one job: its terminal record, and whether its stream tells exactly the same."""

    result: Result
    texts: tuple[str, ...]
    """Joined from the stream, one per choice."""
    stream_verified: bool


class Client:
    """Async context manager. Connects to Kafka on entry; `kafka=False` is for streams and cancelling only."""

    def __init__(self, settings: Settings, *, kafka: bool = True) -> None:
        self.settings = settings
        self.config = kafka_config(settings, client_id="tailrace-client")
        self.redis: Redis = redis_client(settings)
        self.results = ResultFollower(self.config)
        self.lookup = ResultLookup(self.config)
        self._kafka = kafka
        self._producer: AIOKafkaProducer | None = None

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
        await self.results.stop()
        if self._producer is not None:
            await self._producer.stop()
        await self.redis.aclose()

    async def publish(
        self, job_id: str, value: bytes, *, headers: tuple[tuple[str, bytes], ...] = ()
    ) -> None:
        """Returns when every in-sync replica has the job."""
        assert self._producer is not None, "Client(kafka=False) cannot publish"
        try:
            await self._producer.send_and_wait(
                self.settings.jobs_topic, value, key=job_id.encode(), headers=list(headers)
            )
        except KafkaError as error:
            raise DependencyError(f"job {job_id} could not be published: {_reason(error)}") from error

    async def run(
        self,
        job: Mapping[str, Any],
        *,
        verify_stream: bool = True,
        on_item: Callable[[Item], None] | None = None,
    ) -> Finished:
        """Publish one job and wait for its end; reads the whole stream when `verify_stream`.

        `on_item` sees the stream as it comes. Cancelling the call cancels the job.
        """
        job_id = str(job["id"])
        awaited = self.results.expect(job_id)
        live = None if on_item is None else asyncio.create_task(self._read(job_id, on_item, None))
        try:
            await self.publish(job_id, orjson.dumps(job))
            result = await self.result_of(job_id, awaited)
            if not verify_stream:
                return Finished(result, (), False)
            reading = live or asyncio.create_task(self._read(job_id, None, STREAM_TIMEOUT_S))
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                texts, whole = await reading
        except asyncio.CancelledError:
            with contextlib.suppress(DependencyError):
                await self.cancel(job_id)
            raise
        except TimeoutError:
            return Finished(result, (), False)
        finally:
            awaited.cancel()
            if live is not None:
                live.cancel()
        return _finished(result, texts, whole)

    async def result_of(self, job_id: str, awaited: "asyncio.Future[Result]") -> Result:
        """Wait for the terminal record; now and then look whether it came while nobody was listening."""
        while not awaited.done():
            await asyncio.wait({awaited}, timeout=RECHECK_S)
            if not awaited.done() and await self._has_ended(job_id):
                found = await self.lookup.find(job_id)
                if found is not None:
                    return found
        return awaited.result()

    async def _has_ended(self, job_id: str) -> bool:
        try:
            return (
                await self.redis.hget(JobKeys.of(job_id, self.settings.namespace).meta, "ended") is not None
            )
        except RedisError:
            return False  # away for the moment: the results topic will tell

    async def _read(
        self, job_id: str, on_item: Callable[[Item], None] | None, idle_timeout_s: float | None
    ) -> tuple[list[str], bool]:
        """Texts joined from the whole stream, and whether it is proven whole."""
        assembler = StreamAssembler(job_id)
        whole = False
        async with aclosing(self.stream(job_id, assembler, idle_timeout_s=idle_timeout_s)) as items:
            async for item in items:
                whole = isinstance(item, Verdict) and item.complete
                if on_item is not None:
                    on_item(item)
        return assembler.texts(), whole

    def stream(
        self, job_id: str, assembler: StreamAssembler | None = None, *, idle_timeout_s: float | None = None
    ) -> AsyncGenerator[Item, None]:
        """Every event of the job once and in order, whenever one joins; see `read_stream`."""
        return read_stream(
            self.redis,
            job_id,
            assembler=assembler,
            idle_timeout_s=idle_timeout_s,
            config=stream_config(self.settings),
        )

    async def cancel(self, job_id: str) -> None:
        try:
            await request_cancel(self.redis, job_id, namespace=self.settings.namespace)
        except (RedisError, OSError) as error:
            raise DependencyError(f"job {job_id} could not be cancelled: {_reason(error)}") from error

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
        self._producer = AIOKafkaProducer(
            acks="all",
            enable_idempotence=True,
            compression_type="lz4",
            linger_ms=5,
            max_request_size=MAX_REQUEST_BYTES,
            **self.config.client_options(),
        )
        await self._producer.start()
        await self.results.start()


def _finished(result: Result, texts: list[str], whole: bool) -> Finished:
    """Verified only when the stream is whole and says what the result says."""
    expected = [choice.text for choice in result.choices]
    texts = texts + [""] * (len(expected) - len(texts))
    return Finished(result, tuple(texts), whole and texts == expected)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
