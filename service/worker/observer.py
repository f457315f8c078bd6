"""Updates the metrics: some after every step, the others once a second."""

import asyncio
from collections.abc import Callable

from scheduler.plan import StepPlan, StepResult
from scheduler.stats import SchedulerStats
from service.engine.engine import Engine
from service.ingest.consumer import JobConsumer
from service.metrics import Metrics
from service.stream.publisher import StreamPublisher

SAMPLE_INTERVAL_S = 1.0


class Observer:
    def __init__(
        self, metrics: Metrics, engine: Engine, consumer: JobConsumer, publisher: StreamPublisher
    ) -> None:
        self._metrics = metrics
        self._engine = engine
        self._consumer = consumer
        self._publisher = publisher
        self._counted: dict[str, float] = {}

    def step(self, plan: StepPlan, result: StepResult) -> None:
        """Record one finished step (event loop)."""
        metrics = self._metrics
        metrics.step_time.observe(result.step_time_s)
        metrics.batch_size.observe(len(plan.rows))
        metrics.slot_use.set(len(plan.rows) / self._engine.scheduler.config.max_num_seqs)
        if plan.predicted_s is not None and result.step_time_s > 0:
            metrics.step_prediction_error.observe(
                abs(plan.predicted_s - result.step_time_s) / result.step_time_s
            )

    async def run(self, wall_clock: Callable[[], float]) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            self._sample_scheduler(self._engine.scheduler.stats())
            self._sample_edges(wall_clock())

    def _sample_scheduler(self, stats: SchedulerStats) -> None:
        metrics = self._metrics
        for state, blocks in (
            ("free", stats.free_blocks), ("cached", stats.cached_blocks), ("held", stats.held_blocks),
        ):  # fmt: skip
            metrics.blocks.labels(state=state).set(blocks)
        for state, requests in (
            ("running", stats.num_running), ("waiting", stats.num_waiting), ("preempted", stats.num_preempted),
        ):  # fmt: skip
            metrics.requests.labels(state=state).set(requests)
        metrics.decode_cap.set(stats.decode_cap or self._engine.scheduler.config.max_num_seqs)
        metrics.preemptions.inc(self._grown("preemptions", stats.num_preemptions))
        metrics.forks.inc(self._grown("forks", stats.num_forks))

    def _sample_edges(self, wall_s: float) -> None:
        metrics, consumer, publisher = self._metrics, self._consumer.stats(), self._publisher.stats()
        metrics.incomplete_offsets.set(consumer.incomplete)
        head_ms = consumer.head_timestamp_ms
        head_age_s = wall_s - head_ms / 1000 if head_ms and head_ms > 0 else 0.0  # 0, -1: no timestamp
        metrics.head_of_line_age.set(max(0.0, head_age_s))
        metrics.consumer_rebuilds.inc(self._grown("rebuilds", consumer.rebuilds))
        metrics.rebalances.inc(self._grown("assignments", consumer.assignments))
        metrics.redis_backlog_bytes.set(publisher.backlog_bytes)
        metrics.redis_backlog_jobs.set(publisher.backlog_jobs)
        metrics.redis_round_trips.inc(self._grown("round_trips", publisher.round_trips))
        metrics.redis_round_trip_s.inc(self._grown("round_trip_s", publisher.round_trip_s))
        metrics.dependency_up.labels(dependency="kafka").set(consumer.ready)
        metrics.dependency_up.labels(dependency="redis").set(publisher.healthy)

    def _grown(self, name: str, total: float) -> float:
        """Return by how much another part's total has grown since the last call."""
        grown = total - self._counted.get(name, 0)
        self._counted[name] = total
        return grown
