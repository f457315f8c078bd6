"""A runner whose step is a function of the plan, and the plans that it gets."""

from collections.abc import Callable
from dataclasses import replace

from kernels.grammar import Grammars
from kernels.runner import FinishedStep, PendingStep
from scheduler.plan import PENDING_TOKEN, RowResult, SamplingParams, ScheduledRow, StepPlan, StepResult

Step = Callable[[StepPlan], StepResult]


def row(request_id: str) -> ScheduledRow:
    return ScheduledRow(request_id, 0, (1,), 0, (0,), SamplingParams(seed=0), 0)


def pending(request_id: str) -> ScheduledRow:
    return replace(row(request_id), token_ids=(PENDING_TOKEN,), num_generated_tokens=1)


def plan(*request_ids: str) -> StepPlan:
    return StepPlan(
        7, tuple(row(request_id) for request_id in request_ids), released_slots=(3,), block_copies=((1, 2),)
    )


class Scripted:
    """A runner whose `step` is a function of the plan."""

    block_size, num_blocks, vocab_size, max_model_len, eos_token_ids = 16, 4, 10, 64, ()
    prefers_lookahead = False

    def __init__(self, step: Step) -> None:
        self.step = step

    def begin(self, plan: StepPlan) -> PendingStep:
        return FinishedStep(self.step(plan))

    def constrain_with(self, grammars: Grammars) -> None:
        pass

    def warmup(self) -> None:
        pass


class Queued(Scripted):
    """Its steps run when they are waited for."""

    def begin(self, plan: StepPlan) -> PendingStep:
        return Waiting(lambda: self.step(plan))


class Waiting:
    is_done = False

    def __init__(self, run: Callable[[], StepResult]) -> None:
        self.wait = run


def answer(step_plan: StepPlan) -> StepResult:
    return StepResult(step_plan.step_id, tuple(RowResult(r.request_id, 5) for r in step_plan.rows), 0.0)


def poisoned_by(*guilty: str) -> Step:
    def step(step_plan: StepPlan) -> StepResult:
        if any(r.request_id in guilty for r in step_plan.rows):
            raise ZeroDivisionError("in a kernel")
        return answer(step_plan)

    return step


def recorded(seen: list[StepPlan], step: Step = answer) -> Step:
    """The step, and every plan that it gets in `seen`."""

    def record(step_plan: StepPlan) -> StepResult:
        seen.append(step_plan)
        return step(step_plan)

    return record
