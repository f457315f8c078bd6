"""Runs one workload through an engine in this process, without Kafka, Redis or text."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.runner import Runner
from scheduler.plan import SamplingParams, StepPlan, StepResult
from scheduler.spec import FinishReason, RequestSpec, RequestUpdate, ServiceClass
from service.cli.bench_report import summary
from service.cli.workload import WorkloadRequest
from service.engine import StepThread, make_engine
from service.errors import SettingsError
from service.settings import Settings


@dataclass(slots=True)
class Timeline:
    """The times of a request's tokens, on the monotonic clock."""

    num_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    finish: FinishReason | None = None


@dataclass(slots=True)
class EngineRun:
    """Collects what an engine does with a workload; `report` gives its JSON."""

    num_slots: int
    timelines: dict[str, Timeline] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    step_times_s: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    num_open: int = 0
    started_s: float = 0.0
    total_s: float = 0.0
    num_preemptions: int = 0

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        self.step_times_s.append(result.step_time_s)
        self.batch_sizes.append(len(plan.rows))

    def on_updates(self, updates: Sequence[RequestUpdate]) -> None:
        now_s = time.monotonic()
        for update in updates:
            timeline = self.timelines[update.request_id]
            if update.new_token_ids:
                timeline.num_tokens += len(update.new_token_ids)
                timeline.first_s = timeline.first_s or now_s
                timeline.last_s = now_s
            if update.finish is not None:
                timeline.finish = update.finish
                self.num_open -= 1
        if not self.num_open:
            self.done.set()

    def report(self) -> dict[str, Any]:
        lines = list(self.timelines.values())
        num_tokens = sum(line.num_tokens for line in lines)
        return {
            "output_tokens_per_s": round(num_tokens / self.total_s, 3),
            "total_s": round(self.total_s, 3),
            "steps": len(self.step_times_s),
            "slot_use": round(sum(self.batch_sizes) / (self.num_slots * max(1, len(self.batch_sizes))), 4),
            "ttft_s": summary([line.first_s - self.started_s for line in lines if line.first_s]),
            "tpot_s": summary(
                [
                    (line.last_s - line.first_s) / (line.num_tokens - 1)
                    for line in lines
                    if line.first_s and line.last_s and line.num_tokens > 1
                ]
            ),
            "step_s": summary(self.step_times_s),
            "requests": len(lines),
            "output_tokens": num_tokens,
            "mean_batch": round(sum(self.batch_sizes) / max(1, len(self.batch_sizes)), 2),
            "preemptions": self.num_preemptions,
            "failed": sum(line.finish not in (FinishReason.LENGTH, FinishReason.STOP) for line in lines),
        }


async def run_engine(
    settings: Settings,
    step_thread: StepThread,
    runner: Runner,
    requests: Sequence[WorkloadRequest],
    policy: str,
) -> dict[str, Any]:
    """Run all requests at once, greedily, ignoring ends of sequence.

    Raises SettingsError for a request that can never fit.
    """
    run = EngineRun(settings.max_num_seqs)
    engine = make_engine(settings, step_thread, runner, run.on_updates, on_step=run.on_step, policy=policy)
    run.started_s = time.monotonic()
    run.num_open = len(requests)
    for number, request in enumerate(requests):
        spec = _spec(number, request, run.started_s)
        run.timelines[spec.request_id] = Timeline()
        rejection = engine.add(spec)
        if rejection is not None:
            raise SettingsError(f"workload request {number}: {rejection.message}")
    running = asyncio.create_task(engine.run())
    ended = asyncio.create_task(run.done.wait())
    try:
        await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
        run.total_s = time.monotonic() - run.started_s
    finally:
        engine.stop()
        ended.cancel()
        await running
    stats = engine.scheduler.stats()
    run.num_preemptions = stats.num_preemptions
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    return run.report() | {
        "prompt_tokens_per_s": round(num_prompt_tokens / run.total_s, 3),
        "prompt_tokens": num_prompt_tokens,
        "cached_prompt_tokens": stats.prefix_hit_tokens,
    }


def _spec(number: int, request: WorkloadRequest, now_s: float) -> RequestSpec:
    return RequestSpec(
        request_id=f"r{number}",
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        sampling=SamplingParams(seed=number, temperature=0.0),
        arrival_s=now_s,
        service_class=ServiceClass.BATCH,
    )
