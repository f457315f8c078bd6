"""The state of one job in the worker that has it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.spec import FinishReason
from service.ingest.delivery import Delivery
from service.stream.writer import AttemptWriter
from service.text.detokenizer import Detokenizer
from service.wire import ErrorInfo, Job, TokenLogprob, record_time_ms


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_TARGETS = Targets()


@dataclass(slots=True, eq=False)
class ChoiceRun:
    """One of a job's `n` generations."""

    index: int
    request_id: str
    detokenizer: Detokenizer
    stop_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    streamed_ahead: int = 0
    """Characters that an earlier attempt streamed beyond what the tokens alone release: it flushed held-back text
    when the choice ended and died before the job did."""

    def take(self, token_ids: Sequence[int]) -> str:
        """Add tokens up to the one that completes a stop string, so that the number of steps returned at once does
        not matter.

        Returns the released text that no attempt has streamed yet.
        """
        released = []
        for token_id in token_ids:
            if self.detokenizer.stopped:
                break
            self.token_ids.append(token_id)
            released.append(self.detokenizer.feed((token_id,)))
        return self._unstreamed("".join(released))

    def close(self) -> str:
        """Return the text that was still held back, once no more tokens come."""
        return self._unstreamed(self.detokenizer.finish())

    def resume(self, token_ids: Sequence[int], streamed_text: str) -> bool:
        """Start from an earlier attempt's tokens. False: these tokens do not give its text (another model or
        tokenizer wrote them), so they are not used."""
        released = self.take(token_ids)
        if not streamed_text.startswith(released):
            return False
        self.streamed_ahead = len(streamed_text) - len(released)
        return True

    def _unstreamed(self, text: str) -> str:
        if not self.streamed_ahead:
            return text
        skipped = min(self.streamed_ahead, len(text))
        self.streamed_ahead -= skipped
        return text[skipped:]


@dataclass(slots=True, eq=False)
class JobRun:
    """One delivery, from the record to the completed offset. Times are on the monotonic clock."""

    delivery: Delivery
    begun_s: float
    begun_wall_s: float
    """The same moment on the deployment's wall clock."""
    arrival_s: float
    """The record's timestamp, if it is valid and not in the future: the delay in the backlog counts."""
    date_ms: int
    """The date for templates that print it, equal in all attempts: the record's, else that of the first attempt."""
    job: Job | None = None
    targets: Targets = NO_TARGETS
    """The job's latency targets; where it names none, those of its class."""
    job_id: str = ""
    stream: AttemptWriter | None = None
    """Writes the tokens, once the job's stream is ours."""
    number: int = 1
    """Which attempt this is, counted from 1."""
    grammar: str | None = None
    """The grammar of response_format. None: plain text."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_resumed_tokens: int = 0
    choices: list[ChoiceRun] = field(default_factory=list)
    first_step_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cancelled: bool = False
    """Cancellation was requested; it is honoured at the next step, in whatever state the job is."""
    abandoned: bool = False
    """Another worker has the job, or will have it: this one writes nothing more."""
    error: ErrorInfo | None = None

    @classmethod
    def begin(cls, delivery: Delivery, *, now_s: float, wall_s: float) -> "JobRun":
        """Begin the run of a delivery that arrived at now_s on the monotonic clock, wall_s on the deployment's wall
        clock."""
        stamp_ms = record_time_ms(delivery.timestamp_ms)
        age_s = 0.0 if stamp_ms is None else max(0.0, wall_s - stamp_ms / 1000)
        return cls(
            delivery,
            begun_s=now_s,
            begun_wall_s=wall_s,
            arrival_s=now_s - age_s,
            date_ms=int(wall_s * 1000) if stamp_ms is None else stamp_ms,
        )

    @property
    def epoch(self) -> int:
        """The stream's epoch; 0 before this worker writes it."""
        return 0 if self.stream is None else self.stream.epoch

    @property
    def has_time(self) -> bool:
        return record_time_ms(self.delivery.timestamp_ms) is not None

    @property
    def deadline_s(self) -> float | None:
        """On the monotonic clock."""
        deadline_ms = None if self.job is None else self.job.deadline_at_ms(self.date_ms)
        if self.job is None or deadline_ms is None:
            return None
        if isinstance(self.job.deadline, str):
            return self.begun_s + deadline_ms / 1000 - self.begun_wall_s
        return self.arrival_s + (deadline_ms - self.date_ms) / 1000

    @property
    def origin(self) -> str:
        """The record as `topic/partition/offset@timestamp`; a recreated topic repeats the first three."""
        topic, partition, offset = self.record
        return f"{topic}/{partition}/{offset}@{self.delivery.timestamp_ms}"

    @property
    def record(self) -> tuple[str, int, int]:
        return self.delivery.topic, self.delivery.partition, self.delivery.offset

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def finish_rest(self, reason: FinishReason) -> None:
        """End the choices that have not ended yet."""
        for choice in self.choices:
            choice.finish = choice.finish or reason

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)
