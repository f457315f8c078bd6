"""What parts of the service take, with the values that users have and the changes of a test."""

from dataclasses import replace
from typing import Any

from kernels.deterministic import DeterministicOptions
from kernels.runner import RunnerOptions
from scheduler.scheduler_config import Policy, SchedulerConfig
from service import connect
from service.engine.build import class_targets
from service.ingest import KafkaConfig
from service.settings import load_settings, part_of
from service.stream.stream_config import StreamConfig

DEFAULTS = load_settings({})
SMALL_BLOCK = 16
"""Short tests, too, fill blocks of this size."""


def kafka_config(**changes: Any) -> KafkaConfig:
    return replace(connect.kafka_config(DEFAULTS), **changes)


def stream_config(**changes: Any) -> StreamConfig:
    return replace(connect.stream_config(DEFAULTS), **changes)


def runner_options(model: str, **changes: Any) -> RunnerOptions:
    return part_of(DEFAULTS, RunnerOptions, **{"model": model, "block_size": SMALL_BLOCK} | changes)


def deterministic_options(**changes: Any) -> DeterministicOptions:
    sizes = {"num_blocks": 1024, "block_size": SMALL_BLOCK, "max_model_len": None}
    return part_of(DEFAULTS, DeterministicOptions, **sizes | changes)


def scheduler_config(**changes: Any) -> SchedulerConfig:
    """The pool's size and the longest request are the test's to say."""
    return part_of(
        DEFAULTS,
        SchedulerConfig,
        **{"policy": Policy.CONTINUOUS, "targets": class_targets(DEFAULTS)} | changes,
    )
