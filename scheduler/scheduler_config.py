"""Limits and policy of the scheduler, checked once at construction."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from scheduler.spec import ServiceClass


class Policy(StrEnum):
    """How a batch is formed: refilled after every step, or run as a fixed group until all of it has finished."""

    CONTINUOUS = "continuous"
    STATIC = "static"


class InfeasiblePolicy(StrEnum):
    """What happens to a waiting request whose first token is predicted to miss its deadline."""

    EXPIRE = "expire"
    RELEGATE = "relegate"


@dataclass(frozen=True, slots=True)
class ClassTargets:
    """Latency targets of a service class in seconds; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of one scheduler. What has no default is the operator's to say, or the model's.

    `max_num_batched_tokens` must be at least `max_num_seqs`, so that every running request can decode: the settings
    are checked for that. The constructor raises ValueError, naming field, value and limit, if a value is out of range.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    """Number of slots: requests that may run at once."""
    max_model_len: int
    max_num_batched_tokens: int
    """Token budget of a step."""
    policy: Policy
    prefix_caching: bool
    max_waiting: int
    """Waiting requests at which `Scheduler.add` refuses more; preempted ones count."""
    targets: Mapping[ServiceClass, ClassTargets]
    num_lookahead_steps: int = 0
    """Steps that may be planned while one is in flight, 0 or 1. With 1 the device never waits for a plan, but a request
    that ends by a stop id is noticed one step late, and an arrival waits one step longer."""
    watermark_blocks: int | None = None
    """Blocks that an admission leaves free for the growth of running requests; None: 1 % of the pool, at least 1."""
    max_bypasses: int = 16
    """Requests that may be admitted past a blocked one; 0 keeps strict order."""
    max_blocked_scan: int = 8
    """Blocked requests that one step skips before it stops looking for others to admit."""
    ageing_s: float = 30.0
    """Head start of a service class over the next lower one; a lower request that has waited longer goes first."""
    enable_goodput: bool = True
    """Limit decodes, prefill chunks and admissions by the step-time model."""
    min_prefill_tokens: int = 16
    """Prefill tokens that every step may compute however tight the targets are, so that every prompt progresses."""
    max_skipped_steps: int = 3
    """Consecutive steps that a running request may skip while its own TPOT target still holds."""
    infeasible_policy: InfeasiblePolicy = InfeasiblePolicy.EXPIRE
    max_priority_preemptions: int = 3
    """How often one request may be preempted for a higher class; 0 disables preemption by priority."""
    credit_horizon_s: float = 2.0
    """Prefill work to keep waiting, in seconds at the measured prefill rate."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "min_prefill_tokens"):
            _require(name, getattr(self, name), at_least=1)
        for name in ("max_bypasses", "max_blocked_scan", "max_skipped_steps", "max_priority_preemptions"):
            _require(name, getattr(self, name), at_least=0)
        if self.num_lookahead_steps not in (0, 1):
            raise ValueError(f"num_lookahead_steps is {self.num_lookahead_steps}: must be 0 or 1")
        if not 0 <= self.headroom_blocks < max(2, self.num_blocks):
            raise ValueError(
                f"watermark_blocks is {self.watermark_blocks}: must be 0 to {self.num_blocks - 1}"
            )
        if not (self.ageing_s > 0 and self.credit_horizon_s > 0):
            raise ValueError(
                f"ageing_s is {self.ageing_s}, credit_horizon_s {self.credit_horizon_s}: both must be above 0"
            )

    @property
    def headroom_blocks(self) -> int:
        """The watermark in effect, in blocks."""
        if self.watermark_blocks is None:
            return max(1, self.num_blocks // 100)
        return self.watermark_blocks

    @property
    def pool_tokens(self) -> int:
        """Tokens whose K/V the pool can hold."""
        return self.num_blocks * self.block_size

    def targets_of(self, service_class: ServiceClass) -> ClassTargets:
        return self.targets.get(service_class, ClassTargets())


def _require(name: str, value: int, *, at_least: int) -> None:
    if value < at_least:
        raise ValueError(f"{name} is {value}: must be at least {at_least}")
