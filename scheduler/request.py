"""The scheduler's own state of one generation."""

from dataclasses import dataclass, field
from enum import IntEnum

from scheduler.blocks import chain_hash, tenant_salt
from scheduler.config import SchedulerConfig
from scheduler.spec import CLASS_RANK, FinishReason, RequestSpec, due_time_s


class RequestStatus(IntEnum):
    """Ordered: up to PREEMPTED a request waits in the queue and holds nothing."""

    WAITING = 0
    PREEMPTED = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """One generation: `num_computed_tokens` catches up with `num_tokens`."""

    spec: RequestSpec
    order: int
    """Number of arrival; breaks ties and identifies the request for good (ids may come again)."""
    due_s: float
    """Place in the queue: smaller is served first."""
    rank: int
    """Of the service class: 0 is the highest."""
    tpot_s: float | None
    generated: list[int]
    num_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Advanced when a step is scheduled, not when it returns."""
    num_settled_tokens: int = 0
    """Of the computed ones, those whose step has returned: their K/V is in the pool for good."""
    num_pending_tokens: int = 0
    """Output tokens that steps in flight are sampling; not part of num_tokens before they are known."""
    num_in_flight: int = 0
    """Steps handed out and not yet returned that include this request."""
    seat: int = -1
    block_table: tuple[int, ...] = ()
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at the first admission."""
    num_preemptions: int = 0
    num_priority_preemptions: int = 0
    num_bypassed: int = 0
    num_skipped_steps: int = 0
    last_token_s: float = 0.0
    blocked_since_s: float | None = None
    relegated: bool = False
    history_due: bool = False
    is_broken: bool = False
    """A row of it failed: nobody finds or borrows what it computed."""
    ended_well: bool = False
    """With STOP or LENGTH: a row that is planned behind its last token does not matter."""

    @classmethod
    def of(cls, spec: RequestSpec, order: int, config: SchedulerConfig) -> "Request":
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
        """A pending token counts: it can be computed in the step after the one that samples it."""
        return self.num_tokens + self.num_pending_tokens - self.num_computed_tokens

    @property
    def can_decode(self) -> bool:
        """One token is missing, and another one may follow it: a pending one may be the last that is wanted."""
        pending = self.num_pending_tokens
        return self.num_tokens + pending - self.num_computed_tokens == 1 and (
            not pending or len(self.generated) + pending < self.spec.max_tokens
        )

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Small is urgent; the largest is preempted first."""
        return (self.rank, self.due_s, self.order)

    def token_slice(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens at positions start to stop."""
        prompt = self.spec.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        first = max(0, start - len(prompt))
        return prompt[start:] + tuple(self.generated[first : stop - len(prompt)])

    def hash_blocks(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Chained hashes of the first full blocks; each is computed once."""
        hashes = self.block_hashes
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else tenant_salt(self.spec.tenant)
            start = len(hashes) * block_size
            hashes.append(chain_hash(parent, self.token_slice(start, start + block_size)))
        return hashes[:num_blocks]

    def finish_reason(self) -> FinishReason | None:
        """What the known output tokens mean for the request; None: it goes on."""
        return self.spec.finish_reason(self.generated)
