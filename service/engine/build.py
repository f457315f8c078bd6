"""Builds a running engine from the settings: loads the runner on the step thread and sizes the scheduler for it."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence

from kernels.deterministic import DeterministicOptions, DeterministicRunner, StepTime
from kernels.runner import Runner, RunnerOptions
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import ClassTargets, Policy, SchedulerConfig
from scheduler.spec import RequestUpdate, ServiceClass
from service.engine.engine import Engine, StepObserver
from service.engine.step_thread import StepThread
from service.settings import Settings, part_of

SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may keep the interpreter lock from the step thread. Python's default, 5 ms, is as long as a
third of a small model's step."""

DETERMINISTIC_TOKEN_BYTES = 4096
"""Assumed size of a token in the deterministic engine's pool, so that the same setting sizes it."""


def load(settings: Settings) -> Runner:
    """Load and warm up what the settings name; takes seconds. Runs on the step thread."""
    if settings.engine == "deterministic":
        return DeterministicRunner(
            part_of(
                settings,
                DeterministicOptions,
                num_blocks=settings.kv_cache_bytes // (settings.block_size * DETERMINISTIC_TOKEN_BYTES),
                max_model_len=settings.max_model_len or 4096,
                step_time=StepTime(step_s=settings.deterministic_step_ms / 1000),
            )
        )
    from kernels.loading import load_runner  # here, because torch takes seconds
    from kernels.memory import release_free_memory

    runner = load_runner(part_of(settings, RunnerOptions))
    runner.warmup()
    release_free_memory()
    return runner


async def start_step_thread(settings: Settings) -> tuple[StepThread, Runner]:
    """Start the step thread and wait until its runner is loaded. Raises KernelsError when that fails."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    step_thread = StepThread(functools.partial(load, settings))
    return step_thread, await step_thread.start()


def make_scheduler(settings: Settings, runner: Runner, *, policy: str | None = None) -> Scheduler:
    """Make a scheduler for this runner's pool; `policy` overrides the settings', for comparisons."""
    return Scheduler(
        part_of(
            settings,
            SchedulerConfig,
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_model_len=runner.max_model_len,
            num_lookahead_steps=int(plans_ahead(settings, runner)),
            policy=Policy(policy or settings.policy),
            targets=class_targets(settings),
        )
    )


def plans_ahead(settings: Settings, runner: Runner) -> bool:
    """Tell whether the next step is planned while one is in flight."""
    if settings.async_scheduling == "auto":
        return runner.prefers_lookahead
    return settings.async_scheduling == "on"


def class_targets(settings: Settings) -> Mapping[ServiceClass, ClassTargets]:
    """Seconds; 0 in the settings switches a target off."""

    def seconds(milliseconds: int | None) -> float | None:
        return milliseconds / 1000 if milliseconds else None

    return {
        ServiceClass.INTERACTIVE: ClassTargets(
            seconds(settings.interactive_ttft_ms), seconds(settings.interactive_tpot_ms)
        ),
        ServiceClass.STANDARD: ClassTargets(
            seconds(settings.standard_ttft_ms), seconds(settings.standard_tpot_ms)
        ),
        ServiceClass.BATCH: ClassTargets(seconds(settings.batch_ttft_ms), seconds(settings.batch_tpot_ms)),
    }


def make_engine(
    settings: Settings,
    step_thread: StepThread,
    runner: Runner,
    on_updates: Callable[[Sequence[RequestUpdate]], None],
    *,
    on_step: StepObserver | None = None,
    policy: str | None = None,
) -> Engine:
    """Make an engine over a started step thread; one at a time, because they would share the runner's pool."""
    scheduler = make_scheduler(settings, runner, policy=policy)
    if on_step is None:
        return Engine(scheduler, step_thread, on_updates)
    return Engine(scheduler, step_thread, on_updates, on_step=on_step)
