"""What passes between the consumer and its user: records, callbacks, statistics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TopicPartition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One record, still incomplete: it is delivered again, here or elsewhere, until it is reported complete."""

    topic: str
    partition: int
    offset: int
    assignment_epoch: int
    """Grows with each assignment of this consumer. A completion from before the partition was lost is ignored."""
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


class CallbackError(Exception):
    """A callback raised; its exception is the cause. This is our bug, never the broker's: the consumer ends."""


@dataclass(slots=True)
class Callbacks:
    """Calls the three functions of the consumer's user; turns what they raise into CallbackError."""

    on_deliveries: Callable[[Sequence[Delivery]], None]
    on_lost: Callable[[Sequence[TopicPartition]], None]
    read_credit: Callable[[], int]
    failure: Exception | None = field(default=None, init=False)
    """Kept, because aiokafka only logs what a rebalance callback raises."""

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        try:
            self.on_deliveries(deliveries)
        except Exception as error:
            self.failure = error
            raise CallbackError from error

    def lose(self, partitions: Sequence[TopicPartition]) -> None:
        try:
            self.on_lost(partitions)
        except Exception as error:
            self.failure = error
            raise CallbackError from error

    def credit(self) -> int:
        try:
            return max(0, self.read_credit())
        except Exception as error:
            self.failure = error
            raise CallbackError from error

    def check(self) -> None:
        """Raises what a callback raised earlier and aiokafka swallowed."""
        if self.failure is not None:
            raise CallbackError from self.failure


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """A snapshot for metrics and /readyz; counters grow over the consumer's life."""

    ready: bool
    assigned_partitions: int
    incomplete: int
    """Records delivered and not complete."""
    head_timestamp_ms: int | None
    """Kafka timestamp of the oldest incomplete record, which holds the commits back."""
    lag: int
    """Records in the assigned partitions that were not fetched yet, as of the last progress check."""
    paused: bool
    deliveries: int
    skipped: int
    """Records fetched again although they were complete or still in flight here, and not delivered twice."""
    stale_completions: int
    lost_partitions: int
    assignments: int
    commits: int
    commit_failures: int
    pauses: int
    rebuilds: int


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """A snapshot of a ResultProducer; counters grow over its life."""

    ready: bool
    problem: str | None
    """What a reachable broker refuses; None: nothing."""
    in_flight: int
    """Records that were sent and are not acknowledged yet."""
    rebuilds: int
    """How often a broken aiokafka producer was replaced."""
