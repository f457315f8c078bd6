"""Runs a step that raised again row by row, so that only the guilty rows fail. Step thread only."""

import time
from dataclasses import replace

from kernels.runner import Runner
from kernels.runtime.running_step import PREDECESSOR_FAILED
from scheduler.plan import RowResult, StepPlan, StepResult
from service.errors import InternalError


def run_row_by_row(runner: Runner, plan: StepPlan, before: StepResult | None) -> tuple[StepResult, int]:
    """One result for all rows, and how many of them raised by themselves.

    `before` is the previous step's result, which has the pending tokens of this one. Writing a token's K/V twice
    leaves the same K/V, and sampling draws from a counter RNG, so a row that ran in the failed step gives the same
    token when it runs again. Raises InternalError when rows of several jobs run and all of them fail.
    """
    started_s = time.perf_counter()
    known = {row.request_id: row.token_id for row in before.rows} if before else {}
    results: list[RowResult] = []
    num_raised = 0
    jobs_run = set()
    if plan.released_slots or plan.block_copies:
        # By themselves: with a row that raises first, the other rows would run without their copies.
        runner.step(replace(plan, rows=()))
    for row in plan.rows:
        if row.is_pending:
            token_id = known.get(row.request_id)
            if token_id is None:
                results.append(RowResult(row.request_id, error=PREDECESSOR_FAILED))
                continue
            row = replace(row, token_ids=(token_id,))
        result, has_raised = _run_alone(runner, StepPlan(plan.step_id, (row,)))
        jobs_run.add(row.group or row.request_id)
        num_raised += has_raised
        results.append(result)
    if len(jobs_run) > 1 and all(result.error for result in results):
        # Not a row's fault but the engine's: out of memory, a lost device. The jobs must not end for it. The choices
        # of one job prove nothing: they may all fail for the same reason.
        raise InternalError(
            f"step {plan.step_id}: all of its {len(results)} rows, of {len(jobs_run)} jobs, failed together and alone"
        )
    return StepResult(plan.step_id, tuple(results), time.perf_counter() - started_s), num_raised


def _run_alone(runner: Runner, plan: StepPlan) -> tuple[RowResult, bool]:
    """A plan of one row: its result, and whether it raised."""
    try:
        return runner.step(plan).rows[0], False
    except Exception as error:
        return RowResult(plan.rows[0].request_id, error=f"{type(error).__name__} in the model's step"), True
