"""Four choices of one job on SmolLM2: the prompt is computed once, the results are bit-identical to four jobs.

The portable path is slow: a tiny model shows by default what SmolLM2 shows in the slow tier.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from kernels.loading import load_runner
from kernels.models.cpu.decoder import FusedDecoder
from kernels.models.portable import PortableDecoder
from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.runner import Dtype, Quantization
from kernels.runtime.kv_pool import KVPool
from kernels.runtime.model_runner import ModelRunner
from scheduler.plan import RowResult, SamplingParams, StepPlan, StepResult, TokenLogprobs
from scheduler.scheduler import Scheduler
from scheduler.spec import FinishReason, RequestSpec
from tests.kernels.needs import real_model
from tests.kernels.tiny import make_model, save
from tests.support.configs import runner_options, scheduler_config

pytestmark = pytest.mark.model

MAX_TOKENS = 16
NUM_CHOICES = 4


@dataclass(frozen=True)
class Case:
    """A prompt of 100 tokens ends within a block, one of 96 fills its last block."""

    dtype: Dtype
    num_prompt: int
    quantization: Quantization = "none"
    is_tiny: bool = False

    @property
    def is_compiled(self) -> bool:
        """The compiled step does not depend on other rows at all, the portable one does in the last bits."""
        return self.dtype == "bfloat16"


CASES = [
    Case("bfloat16", 100),
    pytest.param(Case("bfloat16", 96), marks=pytest.mark.slow),
    Case("bfloat16", 100, "int8"),
    Case("float32", 96, is_tiny=True),
    pytest.param(Case("float32", 96), marks=pytest.mark.slow),
]


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=lambda case: f"{case.dtype}-{case.quantization}-{case.num_prompt}" + "-tiny" * case.is_tiny,
)
def case(request: pytest.FixtureRequest) -> Case:
    case: Case = request.param
    if case.is_compiled and not cpu_kernels_supported(quantized=case.quantization == "int8"):
        pytest.skip("this processor runs the portable path")
    return case


@pytest.fixture(scope="module")
def num_prompt(case: Case) -> int:
    return case.num_prompt


@pytest.fixture(scope="module")
def runner(case: Case, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    if case.is_tiny:
        model = str(save(make_model("llama"), tmp_path_factory.mktemp("llama")))
    else:
        model = "smollm2-135m-instruct"
        real_model(model)
    options = runner_options(
        model,
        device="cpu",
        dtype=case.dtype,
        quantization=case.quantization,
        kv_cache_bytes=1 << 26,
        max_num_seqs=8,
        num_threads=1,
    )
    loaded = load_runner(options)
    assert isinstance(loaded, ModelRunner)
    return loaded


def pool_of(runner: ModelRunner) -> KVPool:
    model = runner.model
    assert isinstance(model, FusedDecoder | PortableDecoder)
    return model.kv_pool


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass
class Run:
    """Drives the scheduler over a runner; `before` sees each plan, `after` may change each result."""

    runner: ModelRunner
    num_blocks: int = 64
    prefix_caching: bool = True
    before: Callable[[Scheduler, StepPlan], StepPlan] = lambda scheduler, plan: plan
    after: Callable[[StepPlan, StepResult], StepResult] = lambda plan, result: result
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)

    def __call__(self, *specs: RequestSpec) -> "Run":
        pool = pool_of(self.runner)
        pool.keys.fill_(math.nan)  # what is read without having been written or copied shows
        pool.values.fill_(math.nan)
        scheduler = self.scheduler = Scheduler(
            scheduler_config(
                num_blocks=self.num_blocks,
                block_size=self.runner.block_size,
                max_num_seqs=8,
                max_model_len=512,
                max_num_batched_tokens=64,
                prefix_caching=self.prefix_caching,
                enable_goodput=False,
            )
        )
        for spec in specs:
            assert scheduler.add(spec, 0.0) is None
            self.outcomes[spec.request_id] = Outcome()
        now_s, first = 0.0, True
        while scheduler.has_work:
            now_s += 0.01
            plan = scheduler.schedule(now_s)
            assert plan is not None
            self.plans.append(plan)
            # The first plan releases the slots of the previous run.
            released = tuple(range(8)) if first else plan.released_slots
            plan, first = self.before(scheduler, replace(plan, released_slots=released)), False
            scheduler.update(self.after(plan, self.runner.step(plan)), now_s)
            self._collect(scheduler)
            scheduler.pool.check()
        assert scheduler.pool.num_held == 0
        return self

    def _collect(self, scheduler: Scheduler) -> None:
        for update in scheduler.take_updates():
            outcome = self.outcomes[update.request_id]
            outcome.tokens += update.new_token_ids
            outcome.logprobs += update.logprobs
            outcome.finish = update.finish


def choices(num_prompt: int, *, group: str | None = "job") -> list[RequestSpec]:
    prompt = tuple(3 + 37 * i % 190 for i in range(num_prompt))
    return [
        RequestSpec(
            request_id=f"c{i}",
            prompt_token_ids=prompt,
            max_tokens=MAX_TOKENS,
            sampling=SamplingParams(
                seed=70 + i, temperature=0.9, top_k=20, num_logprobs=3, repetition_penalty=1.1
            ),
            arrival_s=0.0,
            fork_group=group,
        )
        for i in range(NUM_CHOICES)
    ]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner, num_prompt: int) -> dict[str, Outcome]:
    """Each choice as a job of its own, one after the other, computing its whole prompt."""
    outcomes: dict[str, Outcome] = {}
    for spec in choices(num_prompt, group=None):
        outcomes |= Run(runner, prefix_caching=False)(spec).outcomes
    assert len({tuple(outcome.tokens) for outcome in outcomes.values()}) == NUM_CHOICES
    return outcomes


def check(case: Case, run: Run, alone: dict[str, Outcome], *names: str, known: int = 0) -> None:
    """These choices equal those that are generated alone, from token number `known` on."""
    for name in names:
        outcome, expected = run.outcomes[name], alone[name]
        assert (outcome.tokens, outcome.finish) == (expected.tokens[known:], expected.finish), name
        if case.is_compiled:
            assert outcome.logprobs == expected.logprobs[known:], name
            continue
        pairs = zip(outcome.logprobs, expected.logprobs[known:], strict=True)
        assert all(one.logprob == pytest.approx(other.logprob, abs=1e-3) for one, other in pairs), name


def num_prefilled(run: Run) -> int:
    return sum(len(row.token_ids) for plan in run.plans for row in plan.rows if not row.num_generated_tokens)


@pytest.mark.parametrize("has_cache", [True, False])
def test_choices_equal_jobs_of_their_own_to_the_bit(
    runner: ModelRunner, case: Case, alone: dict[str, Outcome], has_cache: bool
) -> None:
    run = Run(runner, prefix_caching=has_cache)(*choices(case.num_prompt))

    check(case, run, alone, *alone)
    assert num_prefilled(run) == case.num_prompt + NUM_CHOICES - 1
    assert sum(len(plan.block_copies) for plan in run.plans) == NUM_CHOICES - 1


def test_control_with_copying_switched_off_they_do_not(
    runner: ModelRunner, case: Case, num_prompt: int, alone: dict[str, Outcome]
) -> None:
    run = Run(runner, before=lambda scheduler, plan: replace(plan, block_copies=()))(*choices(num_prompt))

    check(case, run, alone, "c0")
    assert all(run.outcomes[f"c{i}"] != alone[f"c{i}"] for i in range(1, NUM_CHOICES))


def test_a_preempted_fork_equals_an_undisturbed_one(
    runner: ModelRunner, case: Case, num_prompt: int, alone: dict[str, Outcome]
) -> None:
    """The pool has room for the prompt and a block or two of each choice, which needs two or three."""
    run = Run(runner, num_blocks=11, prefix_caching=False)(*choices(num_prompt))

    assert run.scheduler.stats().num_preemptions > 0
    check(case, run, alone, *alone)


@pytest.mark.parametrize(
    "at_step", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)]
)
def test_the_leader_is_cancelled(
    runner: ModelRunner, case: Case, alone: dict[str, Outcome], at_step: int
) -> None:
    """While its first chunk runs, its second, the step that its forks start in, and a decode."""

    def cancel(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
        if plan.step_id == at_step:
            assert scheduler.finish("c0", FinishReason.CANCELLED, 0.0)
        return plan

    run = Run(runner, before=cancel)(*choices(case.num_prompt))

    assert run.outcomes["c0"].finish is FinishReason.CANCELLED
    check(case, run, alone, "c1", "c2", "c3")


def test_nobody_reads_the_blocks_of_a_leader_that_got_nan(
    runner: ModelRunner, case: Case, num_prompt: int, alone: dict[str, Outcome]
) -> None:
    """Its K/V becomes NaN in its last prefill step, whose row ends in an error."""
    pool = pool_of(runner)

    def break_leader(plan: StepPlan, result: StepResult) -> StepResult:
        if plan.step_id != 1:
            return result
        [row] = plan.rows
        assert (row.request_id, row.sampling is not None) == ("c0", True)
        pool.keys[:, list(row.block_table)] = math.nan
        pool.values[:, list(row.block_table)] = math.nan
        return replace(result, rows=(RowResult("c0", error="NaN or infinite logits"),))

    run = Run(runner, after=break_leader)(*choices(num_prompt))

    assert run.outcomes["c0"].finish is FinishReason.ERROR
    check(case, run, alone, "c1", "c2", "c3")
    assert num_prefilled(run) == 2 * num_prompt + NUM_CHOICES - 2


def test_choices_resumed_with_what_each_had_go_on_to_the_bit(
    runner: ModelRunner, case: Case, num_prompt: int, alone: dict[str, Outcome]
) -> None:
    """As after a worker died: another scheduler and pool, with some tokens of each choice known."""
    known = {"c0": 3, "c1": 0, "c2": 11, "c3": MAX_TOKENS}
    specs = [
        replace(spec, generated_token_ids=tuple(alone[spec.request_id].tokens[: known[spec.request_id]]))
        for spec in choices(num_prompt)
    ]

    run = Run(runner, prefix_caching=False)(*specs)

    for name, num_known in known.items():
        check(case, run, alone, name, known=num_known)
    assert sum(plan.num_tokens for plan in run.plans) < num_prompt + NUM_CHOICES * MAX_TOKENS
