"""A tiny model on the GPU's kernels, served by the product's scheduler, with or without look-ahead."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch

from kernels.grammar import Grammars, TokenVocabulary
from kernels.model_config import ModelConfig
from kernels.models.gpu.decoder import GpuDecoderModel
from kernels.runner import PendingStep
from kernels.runtime.gpu.copies import Copies
from kernels.runtime.gpu.kv_pool import GpuKVPool
from kernels.runtime.gpu.step_inputs import StepInputs
from kernels.runtime.model_runner import ModelRunner, PoolShape
from kernels.sampling.gpu.sampler import GpuSampler
from kernels.tools.gpu_bench import RandomWeights
from scheduler.plan import SamplingParams, StepPlan, StepResult, TokenLogprobs
from scheduler.scheduler import Scheduler
from scheduler.spec import FinishReason, RequestSpec, RequestUpdate
from service.engine.step_thread import StepPipeline
from tests.support.configs import scheduler_config

CPU = torch.device("cpu")
CONFIG = ModelConfig("llama", 1, 32, 48, 2, 1, 16, 99, 128, 1e-6, 10000.0)
TOKENS = [b"", b"", *(bytes([byte]) for byte in range(0x20, 0x7F))]
GREEDY = SamplingParams(seed=0, temperature=0.0)
PENALIZED = replace(GREEDY, repetition_penalty=1.8, frequency_penalty=0.7, presence_penalty=0.4)


def make_runner(device: torch.device, copies: Copies | None = None) -> tuple[ModelRunner, StepInputs]:
    torch.manual_seed(3)
    inputs = StepInputs(device, 4, copies=copies)
    pool = GpuKVPool(CONFIG, 12, 16, torch.float32, device)
    weights = RandomWeights(CONFIG, torch.device("cpu"), torch.float32)
    runner = ModelRunner(
        GpuDecoderModel(CONFIG, weights, pool, dtype=torch.float32, inputs=inputs),
        PoolShape(12, 16, 96),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        make_sampler=lambda: GpuSampler(CONFIG.vocab_size, inputs),
    )
    runner.constrain_with(Grammars(TokenVocabulary(TOKENS, frozenset({0})), CONFIG.vocab_size))
    return runner, inputs


@dataclass
class Served:
    """The output of one request."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None

    def take(self, update: RequestUpdate) -> None:
        self.tokens += update.new_token_ids
        self.logprobs += update.logprobs
        self.finish, self.error = update.finish or self.finish, update.error or self.error


def serve(
    runner: ModelRunner,
    specs: Iterable[RequestSpec],
    num_lookahead_steps: int,
    begin: Callable[[StepPlan], PendingStep] | None = None,
) -> dict[str, Served]:
    """Serve until all have ended. With look-ahead, as in the engine, two steps are in flight most of the time."""
    scheduler = Scheduler(
        scheduler_config(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_num_seqs=4,
            max_model_len=runner.max_model_len,
            max_num_batched_tokens=32,
            num_lookahead_steps=num_lookahead_steps,
            enable_goodput=False,
        )
    )
    served: dict[str, Served] = {}
    for spec in specs:
        served[spec.request_id] = Served()
        assert scheduler.add(spec, 0.0) is None
    in_flight: deque[PendingStep] = deque()
    while True:
        while len(in_flight) <= num_lookahead_steps and (plan := scheduler.schedule(0.0)) is not None:
            in_flight.append((begin or runner.begin)(plan))
        if not in_flight:
            break
        scheduler.update(in_flight.popleft().wait(), 0.0)
        for update in scheduler.take_updates():
            served[update.request_id].take(update)
    assert all(each.finish is not None for each in served.values())
    return served


def specs_of(
    sampling: Sequence[SamplingParams], stops: Sequence[int | None] = (), max_tokens: int = 6
) -> list[RequestSpec]:
    """Prompts of different lengths, one longer than a step's budget."""
    stops = [*stops, *([None] * (len(sampling) - len(stops)))]
    return [
        RequestSpec(
            request_id=f"r{i}",
            prompt_token_ids=tuple((7 * j + 3 * i) % 97 for j in range((5, 40, 2, 17, 9)[i % 5])),
            max_tokens=max_tokens - i % 2,
            sampling=params,
            arrival_s=0.0,
            stop_token_ids=frozenset() if stop is None else frozenset({stop}),
        )
        for i, (params, stop) in enumerate(zip(sampling, stops, strict=True))
    ]


MIXED = (
    GREEDY,
    replace(PENALIZED, num_logprobs=3),
    SamplingParams(seed=5, top_p=0.9, frequency_penalty=0.5),
    SamplingParams(seed=6, top_k=20, num_logprobs=1),
    PENALIZED,
)


def assert_same(actual: dict[str, Served], expected: dict[str, Served]) -> None:
    """Equal log-probabilities up to the rounding of matrices whose rows are batched differently."""
    for request_id, one in expected.items():
        other = actual[request_id]
        assert (other.tokens, other.finish, other.error) == (one.tokens, one.finish, one.error), request_id
        for ours, theirs in zip(other.logprobs, one.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]


class Piped:
    """Does what the step thread does around a runner, on this thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self._pipeline = StepPipeline(runner, self._post)
        self.results: dict[int, StepResult] = {}

    def _post(self, future: object, value: StepResult | BaseException) -> None:
        assert isinstance(value, StepResult), value
        self.results[value.step_id] = value

    def begin(self, plan: StepPlan) -> PendingStep:
        self._pipeline.begin(plan, cast("asyncio.Future[StepResult]", object()))
        return _PipedStep(self, plan.step_id)

    def result(self, step_id: int) -> StepResult:
        if step_id not in self.results:
            self._pipeline.flush()
        return self.results[step_id]


@dataclass
class _PipedStep:
    piped: Piped
    step_id: int
    is_done: bool = False

    def wait(self) -> StepResult:
        return self.piped.result(self.step_id)
