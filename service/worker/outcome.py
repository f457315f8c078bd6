"""The outcome of a job: its status, its result and its end event."""

from typing import Literal

from scheduler.spec import FinishReason
from service.wire import (
    Choice,
    ErrorInfo,
    Result,
    SloOutcome,
    Status,
    Timings,
    Usage,
    claimed_custom_id,
)
from service.wire import FinishReason as WireFinishReason
from service.wire.event import Ending
from service.worker.job_run import ChoiceRun, JobRun, Targets

_WIRE_REASON: dict[FinishReason, WireFinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.EXPIRED: "cancelled",
    FinishReason.ERROR: "error",
}

_WORST_FIRST: tuple[tuple[FinishReason, Literal["failed", "cancelled", "expired"]], ...] = (
    (FinishReason.ERROR, "failed"),
    (FinishReason.EXPIRED, "expired"),
    (FinishReason.CANCELLED, "cancelled"),
)


def status_of(run: JobRun) -> Status:
    """The job's status after its choices have ended: the worst of theirs."""
    reasons = {choice.finish for choice in run.choices}
    for reason, status in _WORST_FIRST:
        if reason in reasons:
            return status
    return "completed"


def error_of(run: JobRun, status: Status) -> ErrorInfo | None:
    """Return the error in the result of a job that did not complete."""
    if run.error is not None:
        return run.error
    if status == "failed":
        message = next((choice.error for choice in run.choices if choice.error), "the model's step failed")
        return ErrorInfo("engine_error", message)
    if status == "expired":
        deadline = None if run.job is None else run.job.deadline
        return ErrorInfo(
            "deadline",
            f"deadline: {deadline} passed, or could not be met",
            "deadline",
            deadline,
            "the deadline",
        )
    return None


def usage_of(run: JobRun) -> Usage:
    return Usage(run.num_prompt_tokens, run.num_output_tokens, run.num_cached_tokens)


def timings_of(run: JobRun, now_s: float) -> Timings:
    """Return seconds since the record's timestamp; TPOT is of the longest choice, for this attempt's tokens."""
    ttft_s = tpot_s = queued_s = None
    if run.first_step_s is not None:
        queued_s = run.first_step_s - run.arrival_s
    if run.choices and run.first_token_s is not None and run.last_token_s is not None:
        ttft_s = run.first_token_s - run.arrival_s
        longest = max(len(choice.token_ids) for choice in run.choices)
        num_later = longest - run.num_resumed_tokens // len(run.choices) - 1
        if num_later > 0:
            tpot_s = (run.last_token_s - run.first_token_s) / num_later
    return Timings(queued_s, ttft_s, tpot_s, now_s - run.arrival_s)


def slo_of(timings: Timings, targets: Targets, status: Status) -> SloOutcome:
    """Tell whether each target was met. A job that did not complete met none of its targets."""
    ttft_met = tpot_met = None
    if targets.ttft_s is not None:
        ttft_met = status == "completed" and timings.ttft_s is not None and timings.ttft_s <= targets.ttft_s
    if targets.tpot_s is not None:
        tpot_met = status == "completed" and (timings.tpot_s or 0.0) <= targets.tpot_s
    return SloOutcome(ttft_met, tpot_met)


def result_of(run: JobRun, status: Status, *, worker: str, now_s: float) -> Result:
    """Make the job's result."""
    job, timings = run.job, timings_of(run, now_s)
    return Result(
        id=run.job_id,
        status=status,
        attempt=run.number,
        worker=worker,
        choices=tuple(_choice(choice, run) for choice in run.choices),
        usage=usage_of(run),
        timings=timings,
        slo=slo_of(timings, run.targets, status),
        error=error_of(run, status),
        metadata=None if job is None else job.metadata,
        custom_id=claimed_custom_id(run.delivery.value) if job is None else job.custom_id,
    )


def _choice(choice: ChoiceRun, run: JobRun) -> Choice:
    job = run.job
    assert job is not None, "only decoded jobs have choices"
    return Choice(
        index=choice.index,
        text=choice.detokenizer.text,
        finish_reason=None if choice.finish is None else _WIRE_REASON[choice.finish],
        token_ids=tuple(choice.token_ids) if job.return_token_ids else None,
        logprobs=tuple(choice.logprobs) if job.logprobs is not None else None,
    )


UNREADABLE_CODES = frozenset(
    {"no_value", "record_too_large", "invalid_utf8", "invalid_json", "not_an_object"}
)
"""The record failed; with any other code it was read and its content refused."""


def ending_of(result: Result) -> Ending:
    """Return the end event's fields for this result. A refusal leaves the id free for another record."""
    error = result.error
    unreadable = result.status == "failed" and error is not None and error.code in UNREADABLE_CODES
    first = result.choices[0].finish_reason if result.choices else None
    return Ending(
        result.status, first, result.usage, error, refused=result.status == "rejected" or unreadable
    )
