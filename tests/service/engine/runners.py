"""Runners that behave like a device, and ones that break."""

from collections import deque

from kernels.deterministic import DeterministicOptions, DeterministicRunner
from kernels.runner import FinishedStep, PendingStep
from scheduler.plan import StepPlan, StepResult
from tests.support.configs import deterministic_options

OPTIONS = deterministic_options(num_blocks=64)


class PoisonedRunner(DeterministicRunner):
    """A whole step raises when it has a row of `bad` that is past its first tokens."""

    def begin(self, plan: StepPlan) -> PendingStep:
        return self.compute(plan)

    def compute(self, plan: StepPlan) -> FinishedStep:
        for row in plan.rows:
            if row.request_id.startswith("bad") and row.num_generated_tokens >= 3:
                raise ZeroDivisionError("in a kernel")
        return super().begin(plan)


class QueuedRunner(PoisonedRunner):
    """Like a device: a step that has begun runs when it is waited for, in order, and two may have begun."""

    def __init__(self, options: DeterministicOptions = OPTIONS) -> None:
        super().__init__(options)
        self.begun: deque[QueuedStep] = deque()
        self.most_begun = 0

    def begin(self, plan: StepPlan) -> PendingStep:
        step = QueuedStep(self, plan)
        self.begun.append(step)
        self.most_begun = max(self.most_begun, len(self.begun))
        assert len(self.begun) <= 2
        return step

    def step(self, plan: StepPlan) -> StepResult:
        return self.begin(plan).wait()


class QueuedStep:
    def __init__(self, runner: QueuedRunner, plan: StepPlan) -> None:
        self.runner, self.plan = runner, plan
        self.result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        return self.result is not None

    def wait(self) -> StepResult:
        if self.result is None:
            assert self.runner.begun.popleft() is self, "waited for out of order"
            self.result = self.runner.compute(self.plan).wait()
        return self.result
