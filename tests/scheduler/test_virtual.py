"""The worked example, and the virtual clock that later simulations stand on."""

import pytest

from scheduler.scheduler_config import Policy
from scheduler.spec import FinishReason
from scheduler.step_time import StepCosts
from scheduler.virtual import VirtualRequest, run_lengths, run_virtual
from tests.support.configs import scheduler_config

VARIED = [8, 2, 2, 2, 6, 4, 4, 4]
EVEN = [4] * 8


@pytest.mark.parametrize(
    ("lengths", "policy", "iterations", "slot_use"),
    [
        (VARIED, Policy.STATIC, 14, 0.571),
        (VARIED, Policy.CONTINUOUS, 10, 0.800),
        (EVEN, Policy.STATIC, 8, 1.0),
        (EVEN, Policy.CONTINUOUS, 8, 1.0),
    ],
)
def test_the_worked_example(lengths: list[int], policy: Policy, iterations: int, slot_use: float) -> None:
    run = run_lengths(lengths, 4, policy)
    assert len(run.iterations) == iterations
    assert run.slot_use == pytest.approx(slot_use, abs=0.0005)
    assert [len(outcome.token_times_s) for outcome in run.outcomes.values()] == lengths


def test_slots_by_iteration_show_who_sat_where() -> None:
    rows = [iteration.slots for iteration in run_lengths(VARIED, 4, Policy.CONTINUOUS).iterations]
    assert rows[1] == ("r0", "r1", "r2", "r3")
    assert rows[2] == ("r0", "r4", "r5", "r6")
    assert rows[6] == ("r0", "r4", "r7", None)


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 100])
def test_the_length_of_prompts_does_not_change_the_example(num_prompt_tokens: int) -> None:
    run = run_lengths(VARIED, 4, Policy.CONTINUOUS, num_prompt_tokens)
    assert (len(run.iterations), round(run.slot_use, 3)) == (10, 0.8)


def test_arrivals_times_and_stops_follow_the_virtual_clock() -> None:
    config = scheduler_config(num_blocks=64, block_size=16, max_num_seqs=2, max_model_len=256)
    costs = StepCosts(base_s=0.5, prefill_token_s=0.0, decode_s=0.0, context_token_s=0.0)
    requests = [
        VirtualRequest("late", 4, 3, arrival_s=10.0),
        VirtualRequest("early", 4, 2, max_tokens=9, arrival_s=1.0),
        VirtualRequest("huge", 300, 2),
    ]
    run = run_virtual(config, requests, costs)
    early, late = run.outcomes["early"], run.outcomes["late"]
    assert (early.finish, early.token_times_s) == (FinishReason.STOP, [1.5, 2.0])
    assert (late.finish, late.ttft_s, late.tpot_s) == (FinishReason.LENGTH, 0.5, 0.5)
    assert run.outcomes["huge"].rejection is not None
    assert run.total_s == 11.5


def test_shared_prompts_are_cached_within_a_tenant() -> None:
    config = scheduler_config(num_blocks=64, block_size=16, max_num_seqs=1, max_model_len=256)
    requests = [
        VirtualRequest(f"r{i}", 64, 2, num_shared_tokens=48, tenant="a" if i < 2 else "b") for i in range(4)
    ]
    run = run_virtual(config, requests)
    assert [outcome.num_cached_tokens for outcome in run.outcomes.values()] == [0, 48, 0, 48]


def test_nothing_to_run_is_no_run() -> None:
    config = scheduler_config(num_blocks=4, block_size=16, max_num_seqs=1, max_model_len=64)
    run = run_virtual(config, [])
    assert (run.iterations, run.slot_use, run.total_s) == ((), 0.0, 0.0)


def test_no_lengths_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="output_lengths has 0 entries: at least 1"):
        run_lengths([], 4, Policy.STATIC)
