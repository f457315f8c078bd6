"""What the parts of a worker share: handed to each, owned by the Worker."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.config import ClassTargets
from scheduler.spec import ServiceClass
from service.engine.engine import Engine
from service.grammar import GrammarValidator
from service.ingest.delivery import Delivery
from service.ingest.producer import ResultProducer
from service.metrics import Metrics
from service.stream.publisher import StreamPublisher
from service.text.tokenizer import Tokenizer
from service.worker.job_table import JobTable
from service.worker.line import Line
from service.worker.prompts import PromptEncoder
from service.worker.specs import ModelLimits


@dataclass(frozen=True, slots=True)
class Names:
    """Who this worker is, where its records go and what it takes."""

    worker: str
    results_topic: str
    dead_letter_topic: str
    max_job_bytes: int
    max_attempts: int


@dataclass(frozen=True, slots=True)
class Context:
    names: Names
    limits: ModelLimits
    targets: Mapping[ServiceClass, ClassTargets]
    engine: Engine
    publisher: StreamPublisher
    producer: ResultProducer
    tokenizer: Tokenizer
    table: JobTable
    line: Line
    metrics: Metrics
    complete: Callable[[Delivery], None]
    """Tell the consumer that a record is settled."""
    grammars: GrammarValidator
    prompts: PromptEncoder
    wall_clock: Callable[[], float]
    """Seconds since 1970 as the deployment counts them."""
    clock: Callable[[], float] = field(default=time.monotonic)
