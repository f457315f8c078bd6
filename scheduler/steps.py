"""Turns the tokens granted to requests into a step plan."""

from typing import NamedTuple

from scheduler.admission import num_blocks_for
from scheduler.plan import PENDING_TOKEN, ScheduledRow, StepPlan
from scheduler.request import Request
from scheduler.step_time import StepCosts, StepLoad


class Grant(NamedTuple):
    """Number of tokens that a request may compute in this step."""

    request: Request
    num_tokens: int


class Step(NamedTuple):
    """A plan in flight, the requests of its rows in the same order, its load and when it was planned."""

    plan: StepPlan
    requests: list[Request]
    load: StepLoad
    planned_s: float


def build_step(
    step_id: int,
    grants: list[Grant],
    block_size: int,
    released_slots: tuple[int, ...],
    block_copies: tuple[tuple[int, int], ...],
    costs: StepCosts | None,
    planned_s: float,
) -> Step:
    """Build the plan, rows of one token first, and count the granted tokens as computed.

    costs: predicts the duration of the step; None: no prediction. planned_s: the current time.
    """
    grants.sort(key=lambda grant: grant.num_tokens > 1)
    rows = tuple(_row(request, size, block_size) for request, size in grants)
    num_decodes = sum(size == 1 for _, size in grants)
    load = StepLoad(
        prefill_tokens=sum(size for _, size in grants) - num_decodes,
        decodes=num_decodes,
        context_tokens=sum(request.num_computed_tokens for request, _ in grants),
    )
    predicted_s = None if costs is None else costs.predict(load)
    plan = StepPlan(step_id, rows, released_slots, block_copies, predicted_s)
    return Step(plan, [request for request, _ in grants], load, planned_s)


def _row(request: Request, size: int, block_size: int) -> ScheduledRow:
    start = request.num_computed_tokens
    stop = start + size
    num_pending = request.num_pending_tokens
    samples = stop == request.num_tokens + num_pending
    table = request.block_table
    if num_pending:
        assert samples, f"{request.spec.request_id}: {size} tokens planned although one is not known yet"
        token_ids: tuple[int, ...] = (PENDING_TOKEN,)
    elif samples and size == 1 and request.generated:
        token_ids = (request.generated[-1],)
    else:
        token_ids = request.token_slice(start, stop)
        table = table[: num_blocks_for(stop, block_size)]
    history = None
    if samples and request.history_due:
        history = (request.spec.prompt_token_ids, tuple(request.generated))
        request.history_due = False
    request.num_computed_tokens = stop
    request.num_in_flight += 1
    request.num_pending_tokens += samples
    return ScheduledRow(
        request_id=request.spec.request_id,
        slot=request.slot,
        token_ids=token_ids,
        num_computed_tokens=start,
        block_table=table,
        sampling=request.spec.sampling if samples else None,
        num_generated_tokens=len(request.generated) + num_pending,
        history=history,
        group=request.spec.fork_group,
    )
