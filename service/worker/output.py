"""Handles the tokens of each step: decodes them, streams the deltas and completes finished jobs.

Runs on the event loop while the next step computes; its cost per token is the cost of streaming.
"""

from collections.abc import Callable, Sequence

from scheduler.plan import StepPlan, TokenLogprobs
from scheduler.spec import FinishReason, RequestUpdate
from service.engine.engine import Engine
from service.wire import TokenLogprob, TopLogprob, finite_logprob
from service.worker.edges import Edges
from service.worker.job_run import ChoiceRun, JobRun


class Output:
    def __init__(
        self,
        edges: Edges,
        engine: Engine,
        token_text: Callable[[int], str],
        on_finished: Callable[[JobRun], None],
    ) -> None:
        """`token_text` names a token for its log-probability."""
        self._edges = edges
        self._engine = engine
        self._token_text = token_text
        self._on_finished = on_finished

    def take(self, updates: Sequence[RequestUpdate]) -> None:
        """Handle all updates of one step."""
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
        """Note when a job first ran in a step; only rows that prefill can be new."""
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
        # The maximum over choices: they share the prompt, and a stop string ends one before its last update.
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
        """Stop the other choices of a failed job."""
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
