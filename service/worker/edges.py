"""The connections of a worker: where jobs come from, and where results and streams go."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from service.ingest.delivery import Delivery
from service.ingest.producer import ResultProducer
from service.metrics import Metrics
from service.stream.publisher import StreamPublisher
from service.worker.job_table import JobTable


@dataclass(frozen=True, slots=True)
class Names:
    """The worker's name, the topics it writes and the jobs it accepts."""

    worker: str
    results_topic: str
    dead_letter_topic: str
    max_job_bytes: int
    max_attempts: int


@dataclass(frozen=True, slots=True)
class Edges:
    """Shared by the parts that carry a job through the worker."""

    names: Names
    publisher: StreamPublisher
    producer: ResultProducer
    table: JobTable
    metrics: Metrics
    complete: Callable[[Delivery], None]
    """Tells the consumer that a record is settled."""
    wall_clock: Callable[[], float]
    """Seconds since 1970 as the deployment counts them."""
    clock: Callable[[], float] = time.monotonic
