"""The scheduler's knobs, checked once when they are made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.spec import ServiceClass


class Policy(StrEnum):
    CONTINUOUS = "continuous"
    STATIC = "static"


class HopelessPolicy(StrEnum):
    """What becomes of a waiting request whose first token is predicted after its deadline."""

    EXPIRE = "expire"
    RELEGATE = "relegate"


@dataclass(frozen=True, slots=True)
class ClassTargets:
    """Latency targets of a service class; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None


DEFAULT_TARGETS: Mapping[ServiceClass, ClassTargets] = {
    ServiceClass.INTERACTIVE: ClassTargets(ttft_s=2.0, tpot_s=0.1),
    ServiceClass.STANDARD: ClassTargets(ttft_s=15.0, tpot_s=0.5),
    ServiceClass.BATCH: ClassTargets(),
}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of one scheduler. Raises ValueError naming field, value and limit."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    """Seats: requests that may run at once."""
    max_model_len: int
    max_num_batched_tokens: int = 512
    """Token budget of a step."""
    num_lookahead_steps: int = 0
    """Steps that may be planned while one is out. 1: the device never waits for a plan, but the end of a request by
    a stop id is seen a step late, and an arrival waits a step longer."""
    policy: Policy = Policy.CONTINUOUS
    watermark_blocks: int | None = None
    """Blocks an admission leaves for the growth of running requests; None: 1 % of the pool, at least 1."""
    enable_prefix_caching: bool = True
    max_waiting: int = 1024
    max_bypasses: int = 16
    """How many requests may be admitted past one that is blocked; 0 is strict order."""
    max_blocked_scan: int = 8
    """How many blocked requests one step looks past."""
    targets: Mapping[ServiceClass, ClassTargets] = field(default_factory=lambda: DEFAULT_TARGETS)
    ageing_s: float = 30.0
    """Head start of one service class over the next; a request that waited longer overtakes."""
    enable_goodput: bool = True
    """Cap decodes, chunks and admission by the step-time model."""
    min_prefill_tokens: int = 16
    """Prefill that every step may do however tight the targets are, so that no prompt stands still."""
    max_skipped_steps: int = 3
    """Steps in a row that a running request without a tight target may sit out."""
    hopeless_policy: HopelessPolicy = HopelessPolicy.EXPIRE
    max_priority_preemptions: int = 3
    """How often one request gives way to a higher class; 0 switches preemption by priority off."""
    credit_horizon_s: float = 2.0
    """Prefill work to hold ready, in seconds of the measured prefill rate."""

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "block_size",
            "max_num_seqs",
            "max_model_len",
            "max_waiting",
            "min_prefill_tokens",
        ):
            _require(name, getattr(self, name), at_least=1)
        for name in ("max_bypasses", "max_blocked_scan", "max_skipped_steps", "max_priority_preemptions"):
            _require(name, getattr(self, name), at_least=0)
        if self.num_lookahead_steps not in (0, 1):
            raise ValueError(f"num_lookahead_steps is {self.num_lookahead_steps}: must be 0 or 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: must be at least max_num_seqs, "
                f"{self.max_num_seqs}, so that every running request can decode"
            )
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
        """The watermark in effect."""
        if self.watermark_blocks is None:
            return max(1, self.num_blocks // 100)
        return self.watermark_blocks

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def targets_of(self, service_class: ServiceClass) -> ClassTargets:
        return self.targets.get(service_class, ClassTargets())


def _require(name: str, value: int, *, at_least: int) -> None:
    if value < at_least:
        raise ValueError(f"{name} is {value}: must be at least {at_least}")
