"""What the consumer hands over, and what it tells about itself."""

from dataclasses import dataclass

TopicPartition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One record, still incomplete: it is delivered again, here or elsewhere, until it is reported
    complete."""

    topic: str
    partition: int
    offset: int
    assignment_epoch: int
    """Grows with each assignment of this consumer. A completion from before the partition was lost is
    ignored."""
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """A snapshot for metrics and /readyz; counters grow over the consumer's life."""

    ready: bool
    assigned_partitions: int
    incomplete: int
    """Records delivered and not complete."""
    head_timestamp_ms: int | None
    """Kafka timestamp of the oldest incomplete record: the head of the line that holds the commits back."""
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
