"""All faults, each with the mechanism without which it would break a guarantee."""

from tests.faults.harness import job_faults, kafka_faults, redis_faults, worker_faults
from tests.faults.harness.fault import FAULTS

__all__ = ["FAULTS", "job_faults", "kafka_faults", "redis_faults", "worker_faults"]
