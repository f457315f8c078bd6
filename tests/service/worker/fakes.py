"""Fakes of a worker's parts, without servers: each records its calls in order."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from scheduler.scheduler_config import ClassTargets
from scheduler.spec import FinishReason, Rejection, RequestSpec, ServiceClass
from service.engine.engine import Engine
from service.grammar import GrammarValidator
from service.ingest.delivery import Delivery
from service.ingest.producer import ResultProducer, WithdrawnError
from service.metrics import Metrics
from service.stream.keys import Attempt
from service.stream.publisher import Opened, Outcome, StreamPublisher
from service.stream.writer import AttemptWriter
from service.text.tokenizer import ByteTokenizer
from service.wire.event import Ending
from service.worker.edges import Edges, Names
from service.worker.intake import AdmissionQueue
from service.worker.job_flow import JobFlow
from service.worker.job_table import JobTable
from service.worker.specs import ModelLimits, PromptEncoder, RequestBuilder, TextLanes

LOST = "lost"
"""What a fenced or abandoned stream answers."""


class FakeStream:
    def __init__(self, job_id: str, log: list[tuple[str, Any]], *, number: int = 1) -> None:
        self.attempt = Attempt(job_id, number, "nonce", "origin", "digest", streamed=True, number=number)
        self.epoch = number
        self.log = log
        self.fenced = False
        self.held = asyncio.Event()
        """Cleared by a test that wants to stop between two writes."""
        self.held.set()

    def restart(self) -> None:
        self.log.append(("restart", None))

    def start(self) -> bool:
        self.log.append(("start", None))
        return not self.fenced

    def delta(self, index: int, text: str, token_ids: Sequence[int], logprobs: Any = None) -> bool:
        self.log.append(("delta", (index, text, tuple(token_ids))))
        return not self.fenced

    def accept(self) -> None:
        pass

    async def flushed(self) -> bool:
        await self.held.wait()
        return not self.fenced

    async def decide(self, record: bytes) -> bool:
        await self.held.wait()
        if not self.fenced:
            self.log.append(("decide", record))
        return not self.fenced

    async def end(self, ending: Ending) -> bool:
        await self.held.wait()
        if not self.fenced:
            self.log.append(("end", ending))
        return not self.fenced

    def abandon(self) -> None:
        self.log.append(("abandon", None))


class FakePublisher:
    """`outcomes` are given out in order; after the last one each id is opened anew."""

    def __init__(self, log: list[tuple[str, Any]]) -> None:
        self.log = log
        self.outcomes: list[Opened | Exception] = []
        self.streams: list[FakeStream] = []

    async def open(self, job_id: str, **_: Any) -> Opened:
        if self.outcomes:
            outcome = self.outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        return self.opened(job_id)

    async def origin_of(self, job_id: str) -> str | None:
        return self.streams[-1].attempt.origin if self.streams else None

    def opened(self, job_id: str, **fields: Any) -> Opened:
        from service.stream.assemble import ResumedChoice

        stream = FakeStream(job_id, self.log, number=fields.get("attempts", 1))
        stream.epoch = len(self.streams) + 1
        self.streams.append(stream)
        fields = {"resumed": (ResumedChoice(),), "began_ms": 1} | fields
        return Opened(Outcome.OPENED, stream.epoch, False, stream=cast("AttemptWriter", stream), **fields)


class FakeProducer:
    def __init__(self, log: list[tuple[str, Any]]) -> None:
        self.log = log
        self.failures: list[Exception] = []
        """Raised one after the other, before sends succeed."""
        self.may_send = asyncio.Event()
        self.may_send.set()

    async def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Any = (),
        *,
        optional: bool = False,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        await self.may_send.wait()
        if not wanted():
            raise WithdrawnError(topic)
        if self.failures:
            raise self.failures.pop(0)
        self.log.append((topic, value if topic == "results" else key))


class FakeEngine:
    """Queues what it is given; tests finish requests through the flow's updates."""

    def __init__(self) -> None:
        self.specs: dict[str, RequestSpec] = {}
        self.finished: list[tuple[str, FinishReason]] = []
        self.rejection: Rejection | None = None

    def add(self, spec: RequestSpec) -> Rejection | None:
        if self.rejection is None:
            self.specs[spec.request_id] = spec
        return self.rejection

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        self.finished.append((request_id, reason))
        return self.specs.pop(request_id, None) is not None


class FakeWorker:
    """A JobFlow between fakes. `log` has everything that left it, in order."""

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.log: list[tuple[str, Any]] = []
        self.completed: list[Delivery] = []
        self.publisher = FakePublisher(self.log)
        self.producer = FakeProducer(self.log)
        self.engine = FakeEngine()
        self.table = JobTable()
        self.wall_s = 1_790_000_000.0
        self._executor = ThreadPoolExecutor(max_workers=1)
        tokenizer = ByteTokenizer()
        limits = ModelLimits("fake", 257, 4096, frozenset({256}), 16, 1024)
        lanes = TextLanes(self._executor, self._executor)
        builder = RequestBuilder(
            limits,
            {each: ClassTargets() for each in ServiceClass},
            tokenizer,
            PromptEncoder(tokenizer, lanes, max_tokens=4096),
            GrammarValidator(None),
        )
        edges = Edges(
            names=Names("w", "results", "dead-letter", 1 << 20, 10),
            publisher=cast("StreamPublisher", self.publisher),
            producer=cast("ResultProducer", self.producer),
            table=self.table,
            metrics=Metrics(process=False),
            complete=self._complete,
            wall_clock=lambda: self.wall_s,
        )
        self.flow = JobFlow(
            edges,
            builder,
            cast("Engine", self.engine),
            AdmissionQueue(lambda: 1024),
            tokenizer.token_text,
            superseded_retry_s=0.01,
            on_settled=lambda: None,
        )

    def _complete(self, delivery: Delivery) -> None:
        self.completed.append(delivery)
        self.log.append(("complete", delivery.offset))

    def deliver(self, value: bytes | None, key: bytes | None = b"job", offset: int = 0) -> Delivery:
        delivery = Delivery("jobs", 0, offset, 1, key, value, (), int(self.wall_s * 1000))
        self.flow.on_deliveries([delivery])
        return delivery

    def names(self) -> list[str]:
        return [name for name, _ in self.log]

    async def close(self) -> None:
        await self.flow.close()
        self._executor.shutdown()
