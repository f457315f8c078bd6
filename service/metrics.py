"""What operators watch: Prometheus metrics in base units, without labels per job or tenant."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# 1 ms up, two to three buckets per doubling where targets usually lie.
STEP_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 1.0, 2.0,
)  # fmt: skip
LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0,
    5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)


class Metrics:
    """The metrics of one process in a separate registry, so that tests may have several."""

    def __init__(self, registry: CollectorRegistry | None = None, *, process: bool = True) -> None:
        self.registry = registry or CollectorRegistry()
        if process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
            GCCollector(registry=self.registry)
        self._make_jobs()
        self._make_steps()
        self._make_edges()

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"tailrace_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"tailrace_{name}", text, labels, registry=self.registry)

    def _latency(self, name: str, text: str, labels: tuple[str, ...] = ("service_class",)) -> Histogram:
        return Histogram(f"tailrace_{name}", text, labels, registry=self.registry, buckets=LATENCY_BUCKETS_S)

    def _make_jobs(self) -> None:
        self.jobs = self._counter("jobs", "Jobs that ended, by terminal status.", ("status",))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of jobs that were admitted.")
        self.output_tokens = self._counter("output_tokens", "Tokens generated.")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens taken from the prefix cache.")
        self.queue_time = self._latency("queue_seconds", "From the record's timestamp to the first step.")
        self.ttft = self._latency("ttft_seconds", "From the record's timestamp to the first token.")
        self.tpot = self._latency("tpot_seconds", "Time per output token after the first, per job.")
        self.e2e = self._latency("e2e_seconds", "From the record's timestamp to the terminal record.")
        self.goodput_jobs = self._counter(
            "goodput_jobs", "Completed jobs that met every target they had.", ("service_class",)
        )
        self.duplicates = self._counter("duplicate_jobs", "Deliveries of jobs that had already ended.")
        self.resumed_tokens = self._counter("resumed_tokens", "Tokens of earlier attempts that were kept.")
        self.fenced = self._counter("fenced_events", "Writes refused because a newer attempt had started.")
        self.dead_letters = self._counter("dead_letters", "Records that could not be read.")

    def _make_steps(self) -> None:
        self.step_time = Histogram(
            "tailrace_step_seconds",
            "Duration of a step on the step thread.",
            registry=self.registry,
            buckets=STEP_BUCKETS_S,
        )
        self.batch_size = Histogram(
            "tailrace_batch_requests", "Requests in a step.", registry=self.registry, buckets=BATCH_BUCKETS
        )
        self.step_prediction_error = Histogram(
            "tailrace_step_prediction_error_ratio",
            "Absolute difference of predicted and measured step time over the measured one.",
            registry=self.registry,
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0),
        )
        self.blocks = self._gauge("blocks", "KV blocks by state; the sum never changes.", ("state",))
        self.requests = self._gauge("requests", "Requests by state.", ("state",))
        self.decode_cap = self._gauge("decode_cap_requests", "Largest decode batch that meets the targets.")
        self.preemptions = self._counter("preemptions", "Requests that lost their blocks to another.")
        self.forks = self._counter("forks", "Choices that took over a sibling's computed prompt.")
        self.slot_use = self._gauge("slot_use_ratio", "Share of slots that produced a token, last step.")

    def _make_edges(self) -> None:
        self.incomplete_offsets = self._gauge("incomplete_offsets", "Records fetched but not yet complete.")
        self.head_of_line_age = self._gauge(
            "head_of_line_age_seconds", "Age of the oldest record that holds back a commit."
        )
        self.consumer_rebuilds = self._counter("consumer_rebuilds", "Consumers replaced by the watchdog.")
        self.rebalances = self._counter("rebalances", "Partition assignments received.")
        self.redis_backlog_jobs = self._gauge("redis_backlog_jobs", "Jobs with events not yet in Redis.")
        self.redis_backlog_bytes = self._gauge("redis_backlog_bytes", "Bytes of those events.")
        self.redis_round_trips = self._counter("redis_round_trips", "Pipelined round trips to Redis.")
        self.redis_round_trip_s = self._counter("redis_round_trip_seconds", "Time spent in them.")
        self.dependency_up = self._gauge("dependency_up", "1 while the dependency answers.", ("dependency",))
        self.loop_lag = self._latency("loop_lag_seconds", "How late the event loop ran a timer.", ())
