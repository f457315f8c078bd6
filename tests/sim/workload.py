"""What clients submit in a schedule, and what must come of it: computed from the job, without the service."""

import random
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import orjson

from kernels.deterministic import expected_tokens
from tests.sim.broker import Partition, Unsent

MAX_TOKENS = (1, 4, 4, 12, 12, 40, 100)


class Kind(StrEnum):
    PLAIN = "plain"
    REPEATED = "repeated"
    """The same bytes under the same id, once more."""
    CONFLICTING = "conflicting"
    """Other bytes under the id of an earlier record."""
    UNREADABLE = "unreadable"
    INVALID = "invalid"
    """It can be read, and its content is refused when it is decoded."""
    UNSERVABLE = "unservable"
    """A valid job that this model refuses."""


@dataclass(eq=False)
class Submission:
    """One record on the jobs topic."""

    kind: Kind
    at_s: float
    job_id: str
    value: bytes
    prompt: tuple[int, ...] = ()
    max_tokens: int = 0
    num_choices: int = 1
    stop: str = ""
    streamed: bool = True
    deadline_s: float | None = None
    partition: Partition = ("", 0)
    offset: int = -1
    """Set when the record is appended."""

    def record(self) -> Unsent:
        return Unsent(self.job_id.encode(), self.value, (("traceparent", b"00-ab-cd-01"),))

    @cached_property
    def whole_text(self) -> str:
        """The text of each choice of a job that completes."""
        text = bytes(expected_tokens(self.prompt, self.max_tokens)).decode()
        at = text.find(self.stop) if self.stop else -1
        return text[:at] if at >= 0 else text


@dataclass(slots=True)
class Workload:
    submissions: list[Submission] = field(default_factory=list)
    cancels: dict[str, float] = field(default_factory=dict)
    """Job id to the time at which its cancellation is requested."""


def make_workload(rng: random.Random, chaos_s: float) -> Workload:
    """Up to twenty records in the first two thirds of the time in which faults happen."""
    workload = Workload()
    num_jobs = rng.choice((2, 4, 8, 14))
    for index in range(num_jobs):
        at_s = rng.uniform(0.0, chaos_s * 0.66)
        submission = _job(rng, f"job-{index}", at_s)
        workload.submissions.append(submission)
        draw = rng.random()
        if draw < 0.08:
            workload.submissions.append(_again(submission, Kind.REPEATED, submission.value, rng))
        elif draw < 0.16 and submission.kind is Kind.PLAIN:
            other = _job(rng, submission.job_id, at_s, plain=True)
            again = _again(other, Kind.CONFLICTING, other.value, rng)
            if again.value != submission.value:
                workload.submissions.append(again)
        if rng.random() < 0.15:
            workload.cancels[submission.job_id] = at_s + rng.uniform(-0.2, chaos_s * 0.5)
    return workload


def _job(rng: random.Random, job_id: str, at_s: float, *, plain: bool = False) -> Submission:
    draw = 1.0 if plain else rng.random()
    if draw < 0.04:
        return Submission(Kind.UNREADABLE, at_s, job_id, b'{"id": "' + job_id.encode())
    prompt = tuple(rng.randrange(97, 123) for _ in range(rng.choice((3, 9, 24))))
    max_tokens = rng.choice(MAX_TOKENS)
    job: dict[str, object] = {"id": job_id, "prompt_token_ids": prompt, "max_tokens": max_tokens}
    job["ignore_eos"] = True
    submission = Submission(Kind.PLAIN, at_s, job_id, b"", prompt, max_tokens)
    if draw < 0.07:
        submission.kind, job["max_tokens"] = Kind.INVALID, 0
    elif draw < 0.10:
        submission.kind, job["model"] = Kind.UNSERVABLE, "another"
    elif draw < 0.18:
        submission.num_choices = job["n"] = 2
    elif draw < 0.24:
        submission.streamed = job["stream"] = False
    elif draw < 0.32:
        submission.deadline_s = job["deadline"] = rng.choice((0.3, 2.0, 20.0))
    elif draw < 0.40:
        submission.stop = " "
        job["stop"] = [" "]
    submission.value = orjson.dumps(job)
    return submission


def _again(first: Submission, kind: Kind, value: bytes, rng: random.Random) -> Submission:
    return Submission(
        kind if first.kind is Kind.PLAIN else first.kind,
        first.at_s + rng.uniform(0.0, 2.0),
        first.job_id,
        value,
        first.prompt,
        first.max_tokens,
        first.num_choices,
        first.stop,
        first.streamed,
        first.deadline_s,
    )
