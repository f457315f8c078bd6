"""Tells whether the service has seen a job before, and finds the results of ended ones."""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

from redis.asyncio import Redis

from service.client.result_topic import read_results
from service.errors import JobError
from service.ingest.kafka_config import KafkaConfig
from service.stream.keys import JobKeys
from service.wire import Result
from service.wire.job import fingerprint


class Seen(Enum):
    """What Redis remembers of a job id."""

    NEVER = auto()
    RUNNING = auto()
    ENDED = auto()
    OTHER_JOB = auto()
    """The id belongs to a job with another content."""


async def seen_before(redis: Redis, namespace: str, job_id: str, value: bytes) -> Seen:
    """Returns what Redis remembers of `job_id`, for as long as streams live. A refused job does not hold its id.

    Raises RedisError or OSError when Redis is unreachable.
    """
    fields = ["digest", "ended", "refused"]
    known, ended, refused = await redis.hmget(JobKeys.of(job_id, namespace).meta, fields)
    if known is None or refused is not None:
        return Seen.NEVER
    if known != fingerprint(value).encode():
        return Seen.OTHER_JOB
    return Seen.ENDED if ended else Seen.RUNNING


def other_job(job_id: str) -> JobError:
    """Returns the error of a job whose id was `OTHER_JOB`."""
    return JobError(
        "duplicate_id", f"id: {job_id!r} was given to another job before; the limit is one job per id",
        field="id", value=job_id, limit="one job per id", job_id=job_id,
    )  # fmt: skip


@dataclass(slots=True)
class _Batch:
    job_ids: set[str]
    found: "asyncio.Future[dict[str, Result]]"


class ResultLookup:
    """Reads the results topic from its beginning, once for all callers that ask at about the same time."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._lock = asyncio.Lock()
        self._next: _Batch | None = None

    async def find(self, job_id: str) -> Result | None:
        """Returns the last result of the job; None: the topic holds none. Raises as `read_results` does."""
        batch = self._next
        if batch is None:
            batch = self._next = _Batch(set(), asyncio.get_running_loop().create_future())
        batch.job_ids.add(job_id)
        async with self._lock:
            if not batch.found.done():
                self._next = None
                batch.found.set_result(await read_results(self._config, batch.job_ids))
        return batch.found.result().get(job_id)
