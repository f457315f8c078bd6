"""The wire formats, version 1: jobs, events, results and dead letters."""

from service.wire.common import (
    ErrorInfo,
    FinishReason,
    Status,
    TokenLogprob,
    TopLogprob,
    Usage,
    finite_logprob,
    text_sha256,
)
from service.wire.dead_letter import DeadLetter, Origin, parse_dead_letter
from service.wire.decode import BOM, claimed_custom_id, parse_job, readable_id, record_time_ms
from service.wire.event import (
    Delta,
    End,
    Event,
    Start,
    encode_delta,
    encode_end,
    encode_event,
    encode_start,
    parse_event,
)
from service.wire.job import Job, Message, SloTargets
from service.wire.openai_batch import batch_output, is_line, job_id_of
from service.wire.result import Choice, Result, SloOutcome, Timings, parse_result

__all__ = [
    "BOM",
    "Choice",
    "DeadLetter",
    "Delta",
    "End",
    "ErrorInfo",
    "Event",
    "FinishReason",
    "Job",
    "Message",
    "Origin",
    "Result",
    "SloOutcome",
    "SloTargets",
    "Start",
    "Status",
    "Timings",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
    "batch_output",
    "claimed_custom_id",
    "encode_delta",
    "encode_end",
    "encode_event",
    "encode_start",
    "finite_logprob",
    "is_line",
    "job_id_of",
    "parse_dead_letter",
    "parse_event",
    "parse_job",
    "parse_result",
    "readable_id",
    "record_time_ms",
    "text_sha256",
]
