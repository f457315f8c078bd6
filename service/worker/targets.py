"""Which latency targets a job has: its own, else its class's."""

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.config import ClassTargets
from scheduler.spec import ServiceClass
from service.wire import Job


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_TARGETS = Targets()


def targets_of(job: Job | None, classes: Mapping[ServiceClass, ClassTargets]) -> Targets:
    """A job that could not be read has none."""
    if job is None:
        return NO_TARGETS
    by_class = classes.get(ServiceClass(job.service_class), ClassTargets())
    return Targets(
        by_class.ttft_s if job.slo.ttft_ms is None else job.slo.ttft_ms / 1000,
        by_class.tpot_s if job.slo.tpot_ms is None else job.slo.tpot_ms / 1000,
    )
