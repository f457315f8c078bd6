"""What a step costs the scheduler, counted in calls and bytes: linear in rows, nearly flat in everything else."""

from itertools import pairwise

from scheduler.plan import RowResult, SamplingParams, StepPlan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.spec import RequestSpec
from tests.support.configs import scheduler_config
from tests.support.cost import count_calls, peak_bytes

BLOCK_SIZE = 16
LINEAR = 2.2
"""Twice the size may cost so many times as much."""


def make_scheduler(
    num_rows: int = 1, num_waiting: int = 0, max_tokens: int = 5000, lookahead: int = 0
) -> Scheduler:
    """Requests with prompts of eight tokens; those beyond `num_rows` find no slot."""
    length = 8 + max_tokens
    scheduler = Scheduler(
        scheduler_config(
            num_blocks=(num_rows + 1) * (length // BLOCK_SIZE + 2),
            block_size=BLOCK_SIZE,
            max_num_seqs=num_rows,
            max_model_len=length,
            max_num_batched_tokens=max(512, 8 * num_rows),
            max_waiting=10_000,
        )
    )
    for number in range(num_rows + num_waiting):
        spec = RequestSpec(f"r{number}", (number,) * 8, max_tokens, SamplingParams(seed=number), 0.0)
        assert scheduler.add(spec, 0.0) is None
    return scheduler


def answer(plan: StepPlan) -> StepResult:
    rows = tuple(RowResult(row.request_id, None if row.sampling is None else 7) for row in plan.rows)
    return StepResult(plan.step_id, rows, 0.01)


def run_steps(scheduler: Scheduler, num_steps: int) -> int:
    """Tokens that came out."""
    num_tokens = 0
    for _ in range(num_steps):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(answer(plan), 0.0)
        num_tokens += sum(len(update.new_token_ids) for update in scheduler.take_updates())
    return num_tokens


def test_hazard_output_handling_is_linear_in_output_length() -> None:
    calls = []
    for num_tokens in (1_000, 2_000, 4_000):
        scheduler = make_scheduler()
        calls.append(count_calls(run_steps, scheduler, num_tokens))
        assert scheduler.has_work
    assert all(longer <= LINEAR * shorter for shorter, longer in pairwise(calls)), calls


def test_hazard_no_step_copies_the_tokens_so_far() -> None:
    """A copy of 4,000 token ids is 32 KB; a step may look at its blocks, 250 of them."""
    scheduler = make_scheduler()
    run_steps(scheduler, 100)
    early = peak_bytes(run_steps, scheduler, 2 * BLOCK_SIZE)
    run_steps(scheduler, 3_800)
    late = peak_bytes(run_steps, scheduler, 2 * BLOCK_SIZE)
    assert late < early + 8 * 4_000 / 2, (early, late)


def test_step_is_linear_in_its_rows() -> None:
    calls = []
    for num_rows in (16, 32, 64):
        scheduler = make_scheduler(num_rows)
        run_steps(scheduler, 20)
        calls.append(count_calls(run_steps, scheduler, 64))
    assert all(larger <= LINEAR * smaller for smaller, larger in pairwise(calls)), calls


def test_step_does_not_depend_on_how_many_wait() -> None:
    calls = []
    for num_waiting in (100, 800):
        scheduler = make_scheduler(8, num_waiting)
        run_steps(scheduler, 20)
        calls.append(count_calls(run_steps, scheduler, 64))
    assert calls[1] <= 1.05 * calls[0], calls


def test_step_load_counts_the_context_that_is_read() -> None:
    """What the step-time model is fitted to grows by one token per row and step."""
    scheduler = make_scheduler(4)
    run_steps(scheduler, 3)
    contexts = []
    for _ in range(5):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        contexts.append(scheduler._in_flight[-1].load.context_tokens)
        assert contexts[-1] == sum(row.sample_position for row in plan.rows)
        scheduler.update(answer(plan), 0.0)
        scheduler.take_updates()
    assert [later - earlier for earlier, later in pairwise(contexts)] == [4] * 4
