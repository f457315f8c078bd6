"""Choices that fork over a pool so small that they are preempted, on the runner that detects every wrong block."""

from dataclasses import replace

import pytest

from kernels.deterministic import DeterministicRunner, expected_tokens
from scheduler.plan import SamplingParams, StepPlan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.spec import FinishReason, RequestSpec
from tests.kernels.driving import scheduler_for
from tests.support.configs import deterministic_options

MAX_TOKENS, POISON = 40, 7
PROMPTS = {
    name: tuple(range(30 + 7 * number, 30 + 7 * number + length))
    for number, (name, length) in enumerate({"short": 3, "full": 32, "partial": 41, "long": 77}.items())
}


class WithoutCopies(DeterministicRunner):
    def step(self, plan: StepPlan) -> StepResult:
        return super().step(replace(plan, block_copies=()))


def serve(
    runner: DeterministicRunner, prompts: dict[str, tuple[int, ...]]
) -> tuple[Scheduler, dict[str, list[int]], dict[str, FinishReason]]:
    """Three choices of each prompt; tokens and ends by request id."""
    scheduler = scheduler_for(runner, max_num_seqs=6, max_num_batched_tokens=24)
    tokens: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    for name, prompt in prompts.items():
        for i in range(3):
            sampling = SamplingParams(seed=i)
            spec = RequestSpec(f"{name}.{i}", prompt, MAX_TOKENS, sampling, arrival_s=0.0, fork_group=name)
            assert scheduler.add(spec, 0.0) is None
            tokens[spec.request_id] = []
    now_s = 0.0
    while scheduler.has_work:
        now_s += 0.01
        plan = scheduler.schedule(now_s)
        assert plan is not None
        scheduler.update(runner.step(plan), now_s)
        scheduler.pool.check()
        for update in scheduler.take_updates():
            tokens[update.request_id].extend(update.new_token_ids)
            if update.finish is not None:
                ends[update.request_id] = update.finish
    assert scheduler.pool.num_held == 0
    return scheduler, tokens, ends


def test_every_choice_is_what_it_would_be_alone() -> None:
    runner = DeterministicRunner(deterministic_options(num_blocks=16))

    scheduler, tokens, _ = serve(runner, PROMPTS)

    stats = scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_forks > 4
    assert tokens == {
        f"{name}.{i}": list(expected_tokens(prompt, MAX_TOKENS))
        for name, prompt in PROMPTS.items()
        for i in range(3)
    }


def test_control_without_the_copies_the_runner_notices() -> None:
    with pytest.raises(AssertionError, match="does not continue the context"):
        serve(WithoutCopies(deterministic_options(num_blocks=64)), {"partial": PROMPTS["partial"]})


def test_a_poisoned_prompt_fails_its_own_choices_and_no_others() -> None:
    runner = DeterministicRunner(deterministic_options(num_blocks=64, poison_token_id=POISON))

    _, tokens, ends = serve(runner, {**PROMPTS, "poisoned": (40, POISON, *range(40, 75))})

    for name, prompt in PROMPTS.items():
        for i in range(3):
            assert tokens[f"{name}.{i}"] == list(expected_tokens(prompt, MAX_TOKENS))
    assert [ends[f"poisoned.{i}"] for i in range(3)] == [FinishReason.ERROR] * 3
