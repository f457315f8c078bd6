"""The product's worker in the simulation: the real `Worker`, `assemble` and everything below, with four replacements.

Replaced are aiokafka's three clients, the two connections to Redis, the step thread, and the clocks. The
factories of `service/ingest/kafka_clients.py` run as they are; only the classes that they make are ours.
"""

import asyncio
import contextlib
import itertools
import logging
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import structlog

from kernels.deterministic import DeterministicOptions, DeterministicRunner
from scheduler.plan import StepPlan, StepResult
from service.connect import kafka_config, stream_config
from service.engine.engine import Engine
from service.engine.step_thread import StepPipeline
from service.ingest.kafka_config import KafkaConfig
from service.settings import Settings, load_settings
from service.stream.stream_config import StreamConfig
from service.text.tokenizer import ByteTokenizer
from service.worker import assembly
from service.worker.assembly import Loaded
from service.worker.edges import Edges
from service.worker.namespace import SharedClock
from service.worker.specs import TextLanes
from service.worker.worker import Worker
from tests.sim.kafka_clients import Cluster, SimAdmin, SimProducer
from tests.sim.kafka_consumer import SimConsumer
from tests.sim.loop import VirtualLoop
from tests.sim.network import Network
from tests.sim.redis_clients import SimConnection, SimRedis
from tests.sim.redis_server import RedisServer

NUM_BLOCKS = 64
MAX_MODEL_LEN = 256

SETTINGS = load_settings(
    {
        "TAILRACE_ENGINE": "deterministic",
        "TAILRACE_BLOCK_SIZE": "8",
        "TAILRACE_MAX_NUM_SEQS": "6",
        "TAILRACE_MAX_WAITING": "128",
        "TAILRACE_MAX_NUM_BATCHED_TOKENS": "64",
        "TAILRACE_SESSION_TIMEOUT_S": "6",
        "TAILRACE_DRAIN_GRACE_S": "8",
        "TAILRACE_MAX_OUTPUT_TOKENS": "200",
        "TAILRACE_PARTITIONS": "3",
    }
)
"""The pool is small enough for preemption and large enough for any job of the workload."""


def brief_kafka_config(settings: Settings, *, client_id: str) -> KafkaConfig:
    """All times are shorter by one factor or so, in the same order, so that a schedule has few idle polls."""
    return replace(
        kafka_config(settings, client_id=client_id),
        session_timeout_s=3.0,
        heartbeat_interval_s=0.7,
        rebalance_timeout_s=3.0,
        commit_interval_s=0.3,
        commit_timeout_s=1.0,
        check_interval_s=2.0,
        stall_timeout_s=12.0,
        retry_backoff_max_s=1.0,
        ack_timeout_s=2.0,
    )


def brief_stream_config(settings: Settings, *, worker: str = "") -> StreamConfig:
    return replace(
        stream_config(settings, worker=worker),
        command_timeout_s=1.0,
        connect_timeout_s=1.0,
        stalled_after_s=0.4,
        heartbeat_s=2.0,
        reconnect_max_s=0.5,
        close_timeout_s=0.5,
        claim_ttl_s=3.0,
    )


class _Nothing:
    """Takes the place of all metrics."""

    def __getattr__(self, name: str) -> "_Nothing":
        return self

    def __call__(self, *args: Any, **options: Any) -> "_Nothing":
        return self


NOTHING = _Nothing()


class SimStepThread:
    """The real step pipeline and a real runner; each step takes some virtual time."""

    def __init__(self, network: Network, mean_step_s: float) -> None:
        self._rng = network.rng
        self._mean_step_s = mean_step_s
        self._step_s = 0.0
        self.runner = DeterministicRunner(
            DeterministicOptions(num_blocks=NUM_BLOCKS, block_size=8, max_model_len=MAX_MODEL_LEN)
        )
        self._pipeline = StepPipeline(self.runner, self._post)

    def submit(self, plan: StepPlan) -> "asyncio.Future[StepResult]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        self._step_s = self._mean_step_s * self._rng.uniform(0.5, 1.5)
        loop.call_later(self._step_s, self._pipeline.begin, plan, future)
        return future

    def flush(self) -> None:
        """Steps end when their time has passed."""

    async def stop(self) -> None:
        pass

    def _post(self, future: "asyncio.Future[StepResult]", value: StepResult | BaseException) -> None:
        if future.done():
            return
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(replace(value, step_time_s=self._step_s))


class SimWorker(Worker):
    """The real worker, which loads nothing."""

    def __init__(self, name: str, network: Network, mean_step_s: float) -> None:
        super().__init__(SETTINGS.model_copy(update={"worker_id": name}), NOTHING)  # type: ignore[arg-type]
        self._step_thread = SimStepThread(network, mean_step_s)

    async def run(self) -> None:
        step_thread: Any = self._step_thread
        tokenizer = ByteTokenizer()
        loaded = Loaded(step_thread, step_thread.runner, tokenizer, "deterministic", None)
        lanes: Any = TextLanes(None, None)  # type: ignore[arg-type]  # the loop runs them in place
        await self._serve(assembly.assemble(self._settings, loaded, self.metrics, lanes, worker=self.name))


@dataclass(slots=True)
class Surroundings:
    """What the replaced parts of all workers share."""

    loop: VirtualLoop
    network: Network
    cluster: Cluster
    redis: RedisServer


async def _forever(*_: Any, **__: Any) -> None:
    await asyncio.get_running_loop().create_future()


@contextlib.contextmanager
def replaced(around: Surroundings) -> Iterator[None]:
    """Puts the simulation's parts into the product's modules."""
    clock = around.loop.time
    nonces = itertools.count(1)
    fake_secrets = SimpleNamespace(token_hex=lambda size: f"{next(nonces):0{2 * size}x}")

    for client in (SimConsumer, SimProducer, SimAdmin):
        client.cluster = around.cluster
    for connection in (SimConnection, SimRedis):
        connection.network, connection.server = around.network, around.redis
    with contextlib.ExitStack() as stack:
        for target, part in {
            "service.ingest.kafka_clients.AIOKafkaConsumer": SimConsumer,
            "service.ingest.kafka_clients.AIOKafkaProducer": SimProducer,
            "service.ingest.kafka_clients.AIOKafkaAdminClient": SimAdmin,
            "service.stream.write_loop.Connection": SimConnection,
            "service.stream.control.Redis": SimRedis,
            "service.stream.publisher.secrets": fake_secrets,
            "service.stream.server_check.secrets": fake_secrets,
            "service.worker.worker.watch_loop_lag": _forever,
            "service.worker.assembly.SharedClock": lambda: SharedClock(time.time),
            "service.worker.assembly.Edges": partial(Edges, clock=clock),
            "service.worker.assembly.kafka_config": brief_kafka_config,
            "service.worker.assembly.stream_config": brief_stream_config,
            "service.worker.observer.Observer.run": _forever,
            "service.engine.build.Engine": partial(Engine, clock=clock),
        }.items():
            stack.enter_context(patch(target, part))
        yield


@contextlib.contextmanager
def logs_to(note: Callable[[str], None] | None) -> Iterator[None]:
    """Gives the product's log events to `note`; without it they cost next to nothing."""
    before = structlog.get_config()

    def tell(_: Any, level: str, event: MutableMapping[str, Any]) -> str:
        if note is None:
            raise structlog.DropEvent
        fields = " ".join(
            f"{name}={value}" for name, value in event.items() if name not in ("event", "exc_info")
        )
        note(f"{level} {event.get('event')} {fields}")
        if event.get("exc_info"):
            note(traceback.format_exc())
        raise structlog.DropEvent

    level = logging.DEBUG if note is not None else logging.CRITICAL
    structlog.configure(
        processors=[tell],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)
