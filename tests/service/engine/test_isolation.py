"""The rows of a failed step run alone, and only the guilty one fails."""

from dataclasses import replace

import pytest

from kernels.runtime.running_step import PREDECESSOR_FAILED
from scheduler.plan import RowResult, StepPlan, StepResult
from service.engine.isolation import run_row_by_row
from service.errors import InternalError
from tests.service.engine.scripted import Scripted, answer, pending, plan, poisoned_by, recorded, row


def test_a_row_that_breaks_the_step_fails_alone() -> None:
    result, num_raised = run_row_by_row(Scripted(poisoned_by("bad")), plan("good", "bad", "fine"), None)
    assert [(r.request_id, r.token_id, r.error is not None) for r in result.rows] == [
        ("good", 5, False),
        ("bad", None, True),
        ("fine", 5, False),
    ]
    assert (result.step_id, num_raised) == (7, 1)


def test_rows_that_run_alone_find_blocks_copied_and_slots_released_whichever_row_raises() -> None:
    seen: list[StepPlan] = []
    run_row_by_row(Scripted(recorded(seen, poisoned_by("bad"))), plan("bad", "good"), None)
    assert [(len(p.rows), p.released_slots, p.block_copies) for p in seen] == [
        (0, (3,), ((1, 2),)),
        (1, (), ()),
        (1, (), ()),
    ]


def test_rows_that_run_alone_get_their_pending_token_from_the_step_before() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def step(step_plan: StepPlan) -> StepResult:
        seen.extend((r.request_id, r.token_ids) for r in step_plan.rows)
        return answer(step_plan)

    before = StepResult(6, (RowResult("a", 9), RowResult("b", error="broken")), 0.0)
    rows = (pending("a"), pending("b"), row("c"))
    result, _ = run_row_by_row(Scripted(step), replace(plan(), rows=rows), before)
    assert seen == [("a", (9,)), ("c", (1,))]
    assert [r.error for r in result.rows] == [None, PREDECESSOR_FAILED, None]


def test_a_step_without_a_runnable_row_still_copies_blocks_and_releases_slots() -> None:
    seen: list[StepPlan] = []
    before = StepResult(6, (RowResult("a", error="broken"),), 0.0)
    run_row_by_row(Scripted(recorded(seen)), replace(plan(), rows=(pending("a"),)), before)
    assert seen == [plan()]


def test_a_step_whose_rows_all_fail_alone_too_is_the_engines_fault_not_the_jobs() -> None:
    with pytest.raises(InternalError, match="all of its 2 rows"):
        run_row_by_row(Scripted(poisoned_by("a", "b")), plan("a", "b"), None)


def test_choices_of_one_job_that_all_fail_are_the_jobs_fault_not_the_engines() -> None:
    rows = tuple(replace(each, group="job#1") for each in plan("a", "b").rows)
    result, num_raised = run_row_by_row(Scripted(poisoned_by("a", "b")), replace(plan(), rows=rows), None)
    assert num_raised == 2
    assert all(each.error for each in result.rows)
    with pytest.raises(InternalError, match="all of its 3 rows, of 2 jobs"):
        run_row_by_row(Scripted(poisoned_by("a", "b", "c")), replace(plan(), rows=(*rows, row("c"))), None)


def test_a_single_row_that_fails_is_at_fault_itself() -> None:
    result, _ = run_row_by_row(Scripted(poisoned_by("a")), plan("a"), None)
    assert result.rows[0].error == "ZeroDivisionError in the model's step"
