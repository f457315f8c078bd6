"""Knobs of everything that talks to Kafka."""

import ssl
from dataclasses import dataclass
from typing import Literal

from pydantic import SecretStr

Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """Fields without a default come from the settings, most of them under the same name."""

    kafka_bootstrap: str
    group_id: str
    jobs_topic: str
    results_topic: str
    dead_letter_topic: str
    client_id: str

    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
    ssl_context: ssl.SSLContext | None
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
    kafka_sasl_username: str | None
    kafka_sasl_password: SecretStr | None

    session_timeout_s: float
    rebalance_timeout_s: float
    """How long the group waits for a member that still finishes work: the drain budget."""
    max_poll_interval_s: float
    partitions: int
    replication_factor: int

    metadata_max_age_s: float = 30.0
    """A new partition of the topic is noticed within this time."""
    heartbeat_interval_s: float = 3.0

    poll_timeout_s: float = 0.5
    max_poll_records: int = 256
    resume_credit: int = 1
    """Low-water mark: a paused consumer resumes at this credit, or at half of the most it ever had if that is less.

    Two seconds of prefill may be less than two long prompts: waiting for more credit than one would run them one after
    the other."""
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
        for name in ("max_poll_records", "resume_credit", "max_in_flight_sends"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")

    @property
    def request_timeout_s(self) -> float:
        """aiokafka times JoinGroup like any request, though the broker holds it for the whole rebalance timeout."""
        return self.rebalance_timeout_s + 10.0
