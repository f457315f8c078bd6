"""The attempt that writes a stream, and how the stream ends."""

from dataclasses import dataclass

from service.stream.config import StreamConfig
from service.stream.connection import pack_args
from service.stream.keys import JobKeys, Script
from service.wire.common import ErrorInfo, FinishReason, Status, Usage


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt writes; what the fence compares."""

    job_id: str
    epoch: int
    writer: str
    """A nonce: tells apart two attempts that got one epoch from a Redis that lost its memory and whose clock was set
    back."""
    origin: str
    fingerprint: str
    streamed: bool
    number: int = 1
    """How often the record was begun, this time included."""
    deployment: str = ""
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended, as its end event says it."""

    status: Status
    finish_reason: FinishReason | None
    usage: Usage
    error: ErrorInfo | None = None
    refused: bool = False
    """Nothing of the job was run, and its id stays free for another record."""


NUM_PREFIX = 14
"""EVALSHA, its hash, the number of keys, two keys and the nine arguments that stay the same."""


def append_prefix(attempt: Attempt, config: StreamConfig, script: Script) -> bytes:
    """What every call of the append script for one attempt begins with, packed."""
    keys = JobKeys.of(attempt.job_id, config.namespace)
    constant = (
        "EVALSHA", script.sha, 2, keys.meta, keys.log,
        attempt.epoch, attempt.writer, config.ttl_s * 1000, config.max_log_entries, keys.live,
        attempt.origin, attempt.fingerprint, attempt.deployment, attempt.number,
    )  # fmt: skip
    return pack_args([arg if isinstance(arg, bytes) else str(arg).encode() for arg in constant])
