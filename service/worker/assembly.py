"""Puts the parts of a worker together; none of them runs yet."""

import time
from dataclasses import dataclass

from kernels.grammar import Grammars
from kernels.runner import Runner
from scheduler.plan import StepPlan, StepResult
from service.connect import kafka_config, stream_config
from service.engine import Engine, StepThread, make_engine
from service.engine.build import class_targets
from service.grammar import GrammarValidator
from service.ingest.consumer import JobConsumer
from service.ingest.producer import ResultProducer
from service.metrics import Metrics
from service.settings import Settings, part_of
from service.stream.control import CancelListener
from service.stream.publisher import StreamPublisher
from service.text.tokenizer import Tokenizer
from service.worker.credit import CreditRule
from service.worker.edges import Edges, Names
from service.worker.intake import AdmissionQueue
from service.worker.job_flow import JobFlow
from service.worker.job_table import JobTable
from service.worker.namespace import NamespaceClaim, SharedClock
from service.worker.observer import Observer
from service.worker.specs import ModelLimits, PromptEncoder, RequestBuilder, TextLanes


@dataclass(frozen=True, slots=True)
class Loaded:
    """What took seconds to load."""

    step_thread: StepThread
    runner: Runner
    tokenizer: Tokenizer
    served_name: str
    grammars: Grammars | None
    """None: the model knows no end of sequence."""


@dataclass(frozen=True, slots=True)
class Parts:
    engine: Engine
    publisher: StreamPublisher
    producer: ResultProducer
    consumer: JobConsumer
    listener: CancelListener
    claim: NamespaceClaim
    wall_clock: SharedClock
    flow: JobFlow
    table: JobTable
    observer: Observer
    grammars: GrammarValidator


def end_token_ids(runner: Runner, tokenizer: Tokenizer) -> frozenset[int]:
    """What ends an output, by the model's files and by its tokenizer's."""
    return frozenset(runner.eos_token_ids) | tokenizer.eos_token_ids


def model_limits(settings: Settings, loaded: Loaded) -> ModelLimits:
    return part_of(
        settings,
        ModelLimits,
        served_name=loaded.served_name,
        vocab_size=loaded.runner.vocab_size,
        max_model_len=loaded.runner.max_model_len,
        eos_token_ids=end_token_ids(loaded.runner, loaded.tokenizer),
    )


def assemble(
    settings: Settings, loaded: Loaded, metrics: Metrics, text_lanes: TextLanes, *, worker: str
) -> Parts:
    """Called on the event loop that will run the parts.

    They call each other back in a circle (the consumer delivers to the flow, the flow completes at the consumer), so
    the callbacks look the flow up when they are called; nothing calls before all is built.
    """
    kafka = kafka_config(settings, client_id=worker)
    stream = stream_config(settings, worker=worker)
    table = JobTable()

    def on_step(plan: StepPlan, result: StepResult) -> None:
        parts.observer.step(plan, result)
        parts.flow.output.note_step(plan, time.monotonic() - result.step_time_s)
        queue.wake_next()
        if credit.has_returned():
            parts.consumer.wake()

    def may_open() -> bool:
        return claim.held and listener.listening.is_set()

    engine = make_engine(
        settings, loaded.step_thread, loaded.runner, lambda updates: parts.flow.on_updates(updates), on_step=on_step
    )  # fmt: skip
    queue = AdmissionQueue(lambda: settings.max_waiting - engine.scheduler.stats().num_waiting)
    publisher = StreamPublisher(stream, on_fenced=lambda job_id, epoch: parts.flow.on_fenced(job_id, epoch))
    wall_clock = SharedClock()
    claim = NamespaceClaim(kafka, stream, publisher, wall_clock)
    producer = ResultProducer(kafka, wall_clock)
    listener = CancelListener(stream, lambda job_id: parts.flow.on_cancel(job_id), table.open_job_ids)
    credit = CreditRule(settings, engine.scheduler, publisher, producer, table, may_open=may_open)
    consumer = JobConsumer(
        kafka,
        on_deliveries=lambda records: parts.flow.on_deliveries(records),
        on_lost=lambda partitions: parts.flow.on_lost(partitions),
        credit=credit,
    )
    grammars = GrammarValidator(loaded.grammars)
    prompts = PromptEncoder(loaded.tokenizer, text_lanes, max_tokens=loaded.runner.max_model_len)
    builder = RequestBuilder(
        model_limits(settings, loaded), class_targets(settings), loaded.tokenizer, prompts, grammars
    )
    names = _names(settings, worker)
    edges = Edges(names, publisher, producer, table, metrics, consumer.complete, wall_clock)
    flow = JobFlow(
        edges,
        builder,
        engine,
        queue,
        loaded.tokenizer.token_text,
        superseded_retry_s=settings.session_timeout_s,
        on_settled=consumer.wake,
    )
    observer = Observer(metrics, engine, consumer, publisher)
    parts = Parts(
        engine, publisher, producer, consumer, listener, claim, wall_clock, flow, table, observer, grammars
    )
    return parts


def _names(settings: Settings, worker: str) -> Names:
    return Names(
        worker,
        settings.results_topic,
        settings.dead_letter_topic,
        settings.max_job_bytes,
        settings.max_attempts,
    )
