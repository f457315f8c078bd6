"""What one worker knows of a job while it has it, and how each step's tokens become that job's text and deltas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler.plan import StepPlan, TokenLogprobs
from scheduler.spec import FinishReason, RequestUpdate
from service.engine.engine import Engine
from service.ingest.delivery import Delivery
from service.stream.writer import AttemptWriter
from service.text.detokenizer import Detokenizer
from service.wire import ErrorInfo, Job, TokenLogprob, TopLogprob, finite_logprob, record_time_ms
from service.worker.edges import Edges


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
    """Characters that an earlier attempt already streamed beyond what the tokens alone release: it had
    flushed held-back text at its end, but died before the job's."""

    def take(self, token_ids: Sequence[int]) -> str:
        """Add tokens up to the one that completes a stop string: how many steps came back at once must not show.

        Returns the text they release that no attempt has streamed yet.
        """
        released = []
        for token_id in token_ids:
            if self.detokenizer.stopped:
                break
            self.token_ids.append(token_id)
            released.append(self.detokenizer.feed((token_id,)))
        return self._unstreamed("".join(released))

    def close(self) -> str:
        """The text that was still held back, when nothing more comes."""
        return self._unstreamed(self.detokenizer.finish())

    def resume(self, token_ids: Sequence[int], streamed_text: str) -> bool:
        """Start from an earlier attempt's tokens. False: its text is not what these tokens give, so they cannot
        stand (another model or tokenizer wrote them)."""
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
    """One delivery on its way from the record to the completed offset. Times are on the monotonic clock."""

    delivery: Delivery
    begun_s: float
    begun_wall_s: float
    """The same moment on the deployment's wall clock."""
    arrival_s: float
    """When the record was stamped, as far as that is a time and not in the future: the backlog's delay counts."""
    date_ms: int
    """For templates that print the date, the same for all attempts: of the record; where it has none, of the first
    attempt."""
    job: Job | None = None
    targets: Targets = NO_TARGETS
    """The job's latency targets, its class's where it names none."""
    job_id: str = ""
    stream: AttemptWriter | None = None
    """Writes the tokens, once the job's stream is ours."""
    number: int = 1
    """Which attempt this is, counted from 1."""
    grammar: str | None = None
    """What response_format became. None: plain text."""
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
    """Another worker has the job, or will have it: nothing is written for it any more."""
    error: ErrorInfo | None = None

    @classmethod
    def begin(cls, delivery: Delivery, *, now_s: float, wall_s: float) -> "JobRun":
        """A delivery that came at now_s on the monotonic clock, wall_s on the deployment's wall clock."""
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
        """The record as `topic/partition/offset@timestamp`; a topic created anew repeats the first three."""
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


class Output:
    """Turns the tokens of each step into text and deltas, and hands finished jobs to their completion.

    Runs on the event loop while the next step computes; its cost per token is what streaming costs.
    """

    def __init__(
        self,
        edges: Edges,
        engine: Engine,
        token_text: Callable[[int], str],
        on_finished: Callable[[JobRun], None],
    ) -> None:
        """`token_text` names a token beside its log-probability."""
        self._edges = edges
        self._engine = engine
        self._token_text = token_text
        self._on_finished = on_finished

    def take(self, updates: Sequence[RequestUpdate]) -> None:
        """All updates of one step."""
        now_s = self._edges.clock()
        num_tokens = 0
        for update in updates:
            entry = self._edges.table.request(update.request_id)
            if entry is None:
                continue
            run, choice = entry
            num_tokens += len(update.new_token_ids)
            self._take_one(run, choice, update, now_s)
        if num_tokens:
            self._edges.metrics.output_tokens.inc(num_tokens)

    def note_step(self, plan: StepPlan, started_s: float) -> None:
        """Remember when a job first got into a step; rows that prefill are the only ones that can be new."""
        for row in reversed(plan.rows):
            if row.num_generated_tokens and len(row.token_ids) == 1:
                break
            entry = self._edges.table.request(row.request_id)
            if entry is not None and entry[0].first_step_s is None:
                entry[0].first_step_s = started_s

    def _take_one(self, run: JobRun, choice: ChoiceRun, update: RequestUpdate, now_s: float) -> None:
        text, logprobs = "", None
        num_before = len(choice.token_ids)
        if update.new_token_ids:
            text = choice.take(update.new_token_ids)
            if update.logprobs:
                logprobs = self._named(update)[: len(choice.token_ids) - num_before]
                choice.logprobs.extend(logprobs)
            run.first_token_s = run.first_token_s or now_s
            run.last_token_s = now_s
        if choice.detokenizer.stopped:
            choice.finish = FinishReason.STOP
            if update.finish is None:
                self._engine.finish(choice.request_id, FinishReason.STOP)
        elif update.finish is not None:
            choice.finish, choice.error = update.finish, update.error
            text += choice.close()
        # The largest of any choice: they share the prompt, and a stop string ends one before its last update.
        run.num_cached_tokens = max(run.num_cached_tokens, update.num_cached_tokens)
        if (text or update.new_token_ids) and run.stream is not None:
            run.stream.delta(choice.index, text, tuple(choice.token_ids[num_before:]), logprobs)
        if choice.finish is not None:
            self._edges.table.drop_request(choice.request_id)
            if choice.finish is FinishReason.ERROR:
                self._stop_siblings(run)
            if run.finished:
                self._on_finished(run)

    def _stop_siblings(self, run: JobRun) -> None:
        """The job has failed: its other choices are not needed any more."""
        for choice in run.choices:
            if choice.finish is None:
                self._engine.finish(choice.request_id, FinishReason.CANCELLED)

    def _named(self, update: RequestUpdate) -> list[TokenLogprob]:
        token_text = self._token_text

        def named(token_id: int, of: TokenLogprobs) -> TokenLogprob:
            top = tuple(
                TopLogprob(token_text(other), other, finite_logprob(logprob)) for other, logprob in of.top
            )
            return TokenLogprob(token_text(token_id), token_id, finite_logprob(of.logprob), top)

        return [named(*pair) for pair in zip(update.new_token_ids, update.logprobs, strict=True)]
