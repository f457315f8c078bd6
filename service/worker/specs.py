"""From a job to what the scheduler runs: encodes its prompt off the event loop, checks what only the model can tell."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, NamedTuple

from scheduler.plan import SamplingParams
from scheduler.scheduler_config import ClassTargets
from scheduler.spec import Rejection, RequestSpec, ServiceClass
from service.errors import JobError
from service.grammar import GrammarValidator
from service.text.tokenizer import Tokenizer
from service.wire import Job
from service.worker.job_run import ChoiceRun, JobRun, Targets

LONG_TEXT_CHARS: Final = 1 << 14
"""Takes about 10 ms, during which later jobs wait; a full record of 1 MiB takes a second."""


class TextLanes(NamedTuple):
    """One thread each, so that texts are tokenized in order of arrival."""

    short: Executor
    long: Executor


class PromptEncoder:
    """Renders templates and tokenizes. Long texts wait for each other; a short one waits only for short ones."""

    def __init__(self, tokenizer: Tokenizer, lanes: TextLanes, *, max_tokens: int) -> None:
        """`max_tokens` is the model's length, the limit of a prompt."""
        self._tokenizer = tokenizer
        self._lanes = lanes
        self._max_tokens = max_tokens

    async def encode(self, job: Job, date_ms: int) -> tuple[int, ...]:
        """Return the prompt's ids. Raises JobError when the model's template refuses the prompt or it exceeds the
        model's length."""
        is_long = _num_chars(job) > LONG_TEXT_CHARS
        lane = self._lanes.long if is_long else self._lanes.short
        # A short text that does not fit is tokenized, so that the scheduler's refusal can name its tokens.
        max_tokens = self._max_tokens if is_long else None
        return await asyncio.get_running_loop().run_in_executor(
            lane, encode_prompt, job, self._tokenizer, date_ms, max_tokens
        )


def _num_chars(job: Job) -> int:
    return len(job.prompt or "") + sum(len(message.content) for message in job.messages or ())


def encode_prompt(job: Job, tokenizer: Tokenizer, date_ms: int, max_tokens: int | None) -> tuple[int, ...]:
    """Return the prompt's ids; runs off the event loop.

    A template that prints the date prints that of `date_ms`. Raises JobError; with `max_tokens` at once for a text
    that cannot fit.
    """
    if job.prompt_token_ids is not None:
        return tuple(job.prompt_token_ids)
    if job.prompt is not None:
        return tuple(tokenizer.encode_prompt(job.prompt, max_tokens=max_tokens))
    messages = job.template_messages()
    return tuple(tokenizer.encode_chat(messages, timestamp_ms=date_ms, max_tokens=max_tokens))


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the loaded model allows."""

    served_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    default_max_tokens: int
    max_output_tokens: int


class RequestBuilder:
    """From a job to the requests that the scheduler runs: what only the loaded model can tell is found out here."""

    def __init__(
        self,
        limits: ModelLimits,
        targets: Mapping[ServiceClass, ClassTargets],
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        grammars: GrammarValidator,
    ) -> None:
        self._limits = limits
        self._targets = targets
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._grammars = grammars

    def targets_of(self, job: Job) -> Targets:
        return targets_of(job, self._targets)

    async def prepare(self, run: JobRun, job: Job) -> tuple[int, ...]:
        """The prompt's ids; sets the run's grammar. Raises JobError for what this model cannot run."""
        check_against_model(job, self._limits)
        run.grammar = await self._grammars.admit(job)
        prompt = await self._prompts.encode(job, run.date_ms)
        run.num_prompt_tokens = len(prompt)
        return prompt

    def choices(self, run: JobRun, job: Job, prompt: tuple[int, ...]) -> list[ChoiceRun]:
        """One per `n`, none of them begun."""
        return make_choices(job, run.epoch, prompt, self._tokenizer, self._limits)

    def spec(self, run: JobRun, choice: ChoiceRun, prompt: tuple[int, ...]) -> RequestSpec:
        """The request that generates what the choice still lacks."""
        return make_spec(run, choice, prompt, self._limits)


def check_against_model(job: Job, limits: ModelLimits) -> None:
    """Raise JobError for what no other model of the fleet has to refuse as well."""
    if job.model is not None and job.model != limits.served_name:
        raise JobError(
            "unknown_model", f"model: {job.model!r} is not served here; it may be {limits.served_name!r}",
            field="model", value=job.model, limit=limits.served_name, job_id=job.id,
        )  # fmt: skip
    if (job.max_tokens or 0) > limits.max_output_tokens:
        raise JobError(
            "invalid_value", f"max_tokens: {job.max_tokens} is above the limit {limits.max_output_tokens}",
            field="max_tokens", value=job.max_tokens, limit=limits.max_output_tokens, job_id=job.id,
        )  # fmt: skip
    for field, ids in (
        ("prompt_token_ids", job.prompt_token_ids or ()),
        ("stop", job.stop_token_ids),
        ("logit_bias", [token_id for token_id, _ in job.logit_bias_items]),
    ):
        highest = max(ids, default=0)
        if highest >= limits.vocab_size:
            raise JobError(
                "invalid_value", f"{field}: token id {highest} is above the limit {limits.vocab_size - 1}",
                field=field, value=highest, limit=limits.vocab_size - 1, job_id=job.id,
            )  # fmt: skip


def make_choices(
    job: Job, epoch: int, prompt: tuple[int, ...], tokenizer: Tokenizer, limits: ModelLimits
) -> list[ChoiceRun]:
    """One per `n`. Request ids carry the epoch: a request of an older attempt may still be leaving the engine."""
    stop_ids = job.stop_token_ids | (frozenset() if job.ignore_eos else limits.eos_token_ids)
    return [
        ChoiceRun(
            index=index,
            request_id=f"{job.id}#{epoch}.{index}",
            detokenizer=tokenizer.detokenizer(
                prompt,
                job.stop_strings,
                min_tokens=job.min_tokens,
                # A stop id ends the text and is no part of it, though it may well be a word.
                hidden_token_ids=job.stop_token_ids,
            ),
            stop_token_ids=stop_ids,
        )
        for index in range(job.n)
    ]


def make_spec(run: JobRun, choice: ChoiceRun, prompt: tuple[int, ...], limits: ModelLimits) -> RequestSpec:
    job = run.job
    assert job is not None, "only decoded jobs have choices"
    return RequestSpec(
        request_id=choice.request_id,
        prompt_token_ids=prompt,
        max_tokens=resolve_max_tokens(job, len(prompt), limits),
        sampling=_sampling(job, choice, run.grammar),
        arrival_s=run.arrival_s,
        stop_token_ids=choice.stop_token_ids,
        generated_token_ids=tuple(choice.token_ids),
        service_class=ServiceClass(job.service_class),
        ttft_s=run.targets.ttft_s,
        tpot_s=run.targets.tpot_s,
        deadline_s=run.deadline_s,
        tenant=job.tenant or "",
        fork_group=f"{job.id}#{run.epoch}" if job.n > 1 else None,
    )


def resolve_max_tokens(job: Job, num_prompt_tokens: int, limits: ModelLimits) -> int:
    """The job's own limit, else the service's default as far as the model's length leaves room for it."""
    if job.max_tokens is not None:
        return job.max_tokens
    room = max(1, limits.max_model_len - num_prompt_tokens)
    return max(job.min_tokens, min(limits.default_max_tokens, room))


def rejected(rejection: Rejection, job_id: str) -> JobError:
    return JobError(
        "infeasible",
        f"{rejection.field}: {rejection.message}",
        field=rejection.field,
        value=rejection.value,
        limit=rejection.limit,
        job_id=job_id,
    )


def _sampling(job: Job, choice: ChoiceRun, grammar: str | None) -> SamplingParams:
    return SamplingParams(
        seed=job.seed_of_choice(choice.index),
        temperature=job.temperature,
        top_p=job.top_p,
        top_k=job.top_k,
        min_p=job.min_p,
        presence_penalty=job.presence_penalty,
        frequency_penalty=job.frequency_penalty,
        repetition_penalty=job.repetition_penalty,
        logit_bias=job.logit_bias_items,
        num_logprobs=job.logprobs,
        banned_token_ids=tuple(sorted(choice.stop_token_ids)) if job.min_tokens else (),
        min_tokens=job.min_tokens,
        grammar=grammar,
    )


def targets_of(job: Job, classes: Mapping[ServiceClass, ClassTargets]) -> Targets:
    """The job's own latency targets, its class's where it names none."""
    by_class = classes.get(ServiceClass(job.service_class), ClassTargets())
    return Targets(
        by_class.ttft_s if job.slo.ttft_ms is None else job.slo.ttft_ms / 1000,
        by_class.tpot_s if job.slo.tpot_ms is None else job.slo.tpot_ms / 1000,
    )
