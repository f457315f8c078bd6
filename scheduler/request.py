"""The scheduler's state of one generation, and the plan of a step built from such states."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from scheduler.blocks import chain_hash, num_blocks_for, tenant_salt
from scheduler.plan import PENDING_TOKEN, ScheduledRow, StepPlan
from scheduler.scheduler_config import SchedulerConfig
from scheduler.spec import CLASS_RANK, FinishReason, RequestSpec, due_time_s
from scheduler.step_time import StepCosts, StepLoad


class RequestStatus(IntEnum):
    """Ordered: up to PREEMPTED a request is in the waiting queue and holds neither blocks nor a slot."""

    WAITING = 0
    PREEMPTED = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """One generation: `num_computed_tokens` catches up with `num_tokens`."""

    spec: RequestSpec
    order: int
    """Arrival number: breaks ties and identifies the request, since request ids may be used again."""
    due_s: float
    """Position in the waiting queue: smaller goes first."""
    rank: int
    """Rank of the service class; 0 is the highest."""
    tpot_s: float | None
    generated: list[int]
    num_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Advanced when a step is planned, not when it returns."""
    num_settled_tokens: int = 0
    """Computed tokens whose step has returned: their K/V is in the pool."""
    num_pending_tokens: int = 0
    """Output tokens that steps in flight are sampling; num_tokens counts them once they are known."""
    num_in_flight: int = 0
    """Steps in flight that include this request."""
    slot: int = -1
    block_table: tuple[int, ...] = ()
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission; None: not admitted yet."""
    num_preemptions: int = 0
    num_priority_preemptions: int = 0
    num_bypassed: int = 0
    num_skipped_steps: int = 0
    last_token_s: float = 0.0
    blocked_since_s: float | None = None
    relegated: bool = False
    history_due: bool = False
    is_broken: bool = False
    """A row of it failed, so no other request may use the K/V that it computed."""
    ended_well: bool = False
    """Ended with STOP or LENGTH, so a row planned after its last token does not matter."""

    @classmethod
    def of(cls, spec: RequestSpec, order: int, config: SchedulerConfig) -> "Request":
        """Create the state of a new request; `order` is its arrival number."""
        targets = config.targets_of(spec.service_class)
        ttft_s = targets.ttft_s if spec.ttft_s is None else spec.ttft_s
        rank = CLASS_RANK[spec.service_class]
        return cls(
            spec=spec,
            order=order,
            due_s=due_time_s(spec.arrival_s, ttft_s, rank, config.ageing_s),
            rank=rank,
            tpot_s=targets.tpot_s if spec.tpot_s is None else spec.tpot_s,
            generated=list(spec.generated_token_ids),
            num_tokens=len(spec.prompt_token_ids) + len(spec.generated_token_ids),
        )

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute, pending ones included: the next step can compute a token that the current one samples."""
        return self.num_tokens + self.num_pending_tokens - self.num_computed_tokens

    @property
    def can_decode(self) -> bool:
        """Whether exactly one token is missing and another may follow it (a pending token may be the last one)."""
        pending = self.num_pending_tokens
        return self.num_tokens + pending - self.num_computed_tokens == 1 and (
            not pending or len(self.generated) + pending < self.spec.max_tokens
        )

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Sort key: the smallest is the most urgent, the largest is preempted first."""
        return (self.rank, self.due_s, self.order)

    def token_slice(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the known tokens at positions [start, stop)."""
        prompt = self.spec.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        first = max(0, start - len(prompt))
        return prompt[start:] + tuple(self.generated[first : stop - len(prompt)])

    def hash_blocks(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the chained hashes of the first `num_blocks` full blocks; each is computed once."""
        hashes = self.block_hashes
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else tenant_salt(self.spec.tenant)
            start = len(hashes) * block_size
            hashes.append(chain_hash(parent, self.token_slice(start, start + block_size)))
        return hashes[:num_blocks]

    def finish_reason(self) -> FinishReason | None:
        """Return why the known output tokens end the request; None: it continues."""
        return self.spec.finish_reason(self.generated)


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
