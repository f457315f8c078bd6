"""Jobs that the service has seen before: still running, or ended with a result on the topic."""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

from redis.asyncio import Redis

from service.client.results import read_results
from service.errors import JobError
from service.ingest.config import KafkaConfig
from service.ingest.delivery import Delivery
from service.stream.keys import JobKeys
from service.wire import Result
from service.worker.digest import digest_of


class Seen(Enum):
    NEVER = auto()
    RUNNING = auto()
    ENDED = auto()
    OTHER_JOB = auto()
    """The id belongs to a job with another content."""


async def seen_before(redis: Redis, namespace: str, job_id: str, value: bytes) -> Seen:
    """What Redis remembers of `job_id`; it forgets after the streams' time to live. A refused job holds no id."""
    fields = ["digest", "ended", "refused"]
    digest, ended, refused = await redis.hmget(JobKeys.of(job_id, namespace).meta, fields)
    if digest is None or refused is not None:
        return Seen.NEVER
    ours = digest_of(Delivery("", 0, 0, 0, None, value, (), 0))
    if digest != ours.encode():
        return Seen.OTHER_JOB
    return Seen.ENDED if ended else Seen.RUNNING


def other_job(job_id: str) -> JobError:
    """What to tell of an id that was `OTHER_JOB`."""
    return JobError(
        "duplicate_id", f"id: {job_id!r} was given to another job before; the limit is one job per id",
        field="id", value=job_id, limit="one job per id", job_id=job_id,
    )  # fmt: skip


@dataclass(slots=True)
class _Batch:
    job_ids: set[str]
    found: "asyncio.Future[dict[str, Result]]"


class ResultLookup:
    """Reads the results topic from its beginning, once for all who ask at about the same time."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._lock = asyncio.Lock()
        self._next: _Batch | None = None

    async def find(self, job_id: str) -> Result | None:
        batch = self._next
        if batch is None:
            batch = self._next = _Batch(set(), asyncio.get_running_loop().create_future())
        batch.job_ids.add(job_id)
        async with self._lock:
            if not batch.found.done():
                self._next = None
                batch.found.set_result(await read_results(self._config, batch.job_ids))
        return batch.found.result().get(job_id)
