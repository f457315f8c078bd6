"""What streaming costs: CPU time of the event loop per step, with 32 running streams, against the step's own time.

    python -m ops.bench.loop_profile [--streams 32] [--tokens 128] [--json]

Runs a whole worker (embedded Kafka and Redis in processes of their own, the real model) and reads the CPU clock of
the event loop's thread in every step in which all streams run. Everything on that thread is counted: scheduler,
detokenizer, publisher, Kafka client, Redis client, asyncio itself, and the client that waits for the results.
Other load on the machine lengthens the model's step and so lowers the share; `loop_cpu_ms_per_step` stays comparable.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from scheduler.plan import StepPlan, StepResult
from service.cli.serve import local_service
from service.client import Client
from service.settings import load_settings
from service.worker.worker import Worker

PARTS = ("schedule", "update", "deliver")


@dataclass
class Meter:
    """CPU seconds of the event loop's thread, by step and by part."""

    num_streams: int
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    """(clock, loop CPU so far, step time) of each step in which all streams decode."""
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        if len(plan.rows) == self.num_streams == plan.num_tokens:
            self.steps.append((time.perf_counter(), time.thread_time(), result.step_time_s))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts[part] += time.thread_time() - started

        return measured

    def report(self) -> dict[str, Any]:
        count = len(self.steps) - 1
        (begin_s, begin_cpu_s, _), (end_s, end_cpu_s, _) = self.steps[0], self.steps[-1]
        loop_s, wall_s = (end_cpu_s - begin_cpu_s) / count, (end_s - begin_s) / count
        step_s = statistics.fmean(step for _, _, step in self.steps[1:])
        parts_ms = {name: round(1000 * total / count, 3) for name, total in self.parts.items()}
        return {
            "streams": self.num_streams,
            "steps": count,
            "wall_ms_per_step": round(1000 * wall_s, 3),
            "model_ms_per_step": round(1000 * step_s, 3),
            "between_steps_ms": round(1000 * (wall_s - step_s), 3),
            "loop_cpu_ms_per_step": round(1000 * loop_s, 3),
            "loop_cpu_share_of_step": round(loop_s / step_s, 4),
            "of_which_ms": parts_ms
            | {"kafka_redis_asyncio": round(1000 * loop_s - sum(parts_ms.values()), 3)},
        }


def attach(meter: Meter, worker: Worker) -> None:
    """Measure inside the running worker; a profiler would cost more than what it measures."""
    parts = worker.parts
    assert parts is not None
    engine = parts.engine
    engine.scheduler.schedule = meter.timed("schedule", engine.scheduler.schedule)  # type: ignore[method-assign]
    engine.scheduler.update = meter.timed("update", engine.scheduler.update)  # type: ignore[method-assign]
    parts.flow.output.take = meter.timed("deliver", parts.flow.output.take)  # type: ignore[method-assign]
    parts.observer.step = _both(parts.observer.step, meter.on_step)  # type: ignore[method-assign]


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        first(*args)
        second(*args)

    return call


async def profile(num_streams: int, num_tokens: int) -> dict[str, Any]:
    meter = Meter(num_streams)
    async with local_service(load_settings()) as (settings, worker), Client(settings) as client:
        attach(meter, worker)
        jobs: list[dict[str, Any]] = [
            {
                "id": f"profile-{time.time_ns()}-{number}",
                "prompt": f"Chapter {number}. The river",
                "max_tokens": num_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "service_class": "batch",
            }
            for number in range(num_streams)
        ]
        results = [client.results.expect(job["id"]) for job in jobs]
        await asyncio.gather(*(client.publish(job["id"], orjson.dumps(job)) for job in jobs))
        await asyncio.gather(*results)
    return meter.report()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = asyncio.run(profile(options.streams, options.tokens))
    if options.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
