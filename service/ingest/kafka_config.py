"""Knobs of everything that talks to Kafka."""

import ssl
from dataclasses import dataclass, field
from typing import Literal

Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    bootstrap: str = "127.0.0.1:9092"
    """host:port, comma separated."""
    group_id: str = "tailrace"
    jobs_topic: str = "tailrace.jobs"
    results_topic: str = "tailrace.results"
    dead_letter_topic: str = "tailrace.dead-letter"
    client_id: str = "tailrace"

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    ssl_context: ssl.SSLContext | None = None
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)

    metadata_max_age_s: float = 30.0
    """A new partition of the topic is noticed within this time."""
    session_timeout_s: float = 45.0
    heartbeat_interval_s: float = 3.0
    rebalance_timeout_s: float = 30.0
    """How long the group waits for a member that still finishes work: the drain budget."""
    max_poll_interval_s: float = 300.0

    poll_timeout_s: float = 0.5
    max_poll_records: int = 256
    resume_credit: int = 8
    """Low-water mark: a paused consumer resumes at this credit, or at half of the most it ever had if that is less."""
    fetch_max_bytes: int = 16 * MIB
    max_partition_fetch_bytes: int = 1 * MIB
    """Soft: the first record of a fetch comes whole whatever its size, so this bounds the buffer, not the jobs."""

    commit_interval_s: float = 1.0
    commit_timeout_s: float = 5.0

    check_interval_s: float = 5.0
    """Time between two comparisons of positions with end offsets; after three without an answer the consumer is not
    ready."""
    stall_timeout_s: float = 30.0
    """The consumer is rebuilt when there are records and credit and nothing moves for this long."""
    retry_backoff_max_s: float = 5.0

    create_topics: bool = True
    num_partitions: int = 8
    replication_factor: int = 1
    max_message_bytes: int = 16 * MIB

    compression: Compression = "none"
    """Codec of results, dead letters and the client's jobs. Every client reads "none" and "gzip"; others need an extra
    in aiokafka and kafkajs."""
    max_in_flight_sends: int = 256
    ack_timeout_s: float = 30.0
    """A producer that acknowledges nothing for this long is replaced, and the records are sent again."""

    def __post_init__(self) -> None:
        if self.heartbeat_interval_s * 2 > self.session_timeout_s:
            raise ValueError(
                f"heartbeat_interval_s is {self.heartbeat_interval_s:g}: it may be at most half of"
                f" session_timeout_s ({self.session_timeout_s:g})"
            )
        for name in ("max_poll_records", "resume_credit", "max_in_flight_sends", "num_partitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")

    @property
    def request_timeout_s(self) -> float:
        """aiokafka times JoinGroup like any request, though the broker holds it for the whole rebalance timeout."""
        return self.rebalance_timeout_s + 10.0
