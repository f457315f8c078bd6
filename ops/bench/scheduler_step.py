"""Cost of the scheduler itself: schedule + update + take_updates per step and per decoding row, in µs.

Run from the repository root: `python -m ops.bench.scheduler_step [--rows 64] [--context 512] [--steps 2000]`.
"""

import argparse
import json
from time import perf_counter

from scheduler.plan import RowResult, SamplingParams, StepPlan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import Policy, SchedulerConfig
from scheduler.spec import RequestSpec
from service.engine.build import class_targets
from service.settings import load_settings


def make_scheduler(num_rows: int, num_context: int, num_steps: int, num_waiting: int) -> Scheduler:
    """A scheduler with `num_rows` long requests to decode and more behind them that find no slot."""
    budget = max(2048, num_rows)
    # The first request still decodes when the last one's prompt is done.
    max_tokens = num_steps + 2 * num_rows * num_context // budget + 64
    length = num_context + max_tokens
    config = SchedulerConfig(
        num_blocks=(num_rows + 1) * (length // 16 + 2),
        block_size=16,
        max_num_seqs=num_rows,
        max_model_len=length,
        max_num_batched_tokens=budget,
        policy=Policy.CONTINUOUS,
        prefix_caching=True,
        max_waiting=num_rows + num_waiting,
        targets=class_targets(load_settings({})),
    )
    scheduler = Scheduler(config)
    for number in range(num_rows + num_waiting):
        prompt = tuple(range(number, number + num_context))
        sampling = SamplingParams(seed=number)
        spec = RequestSpec(f"r{number}", prompt, max_tokens, sampling, arrival_s=0.0)
        assert scheduler.add(spec, 0.0) is None
    return scheduler


def answer(plan: StepPlan) -> StepResult:
    rows = tuple(RowResult(row.request_id, 7 if row.sampling is not None else None) for row in plan.rows)
    return StepResult(plan.step_id, rows, step_time_s=0.01 + 0.00001 * plan.num_tokens)


def measure(num_rows: int, num_context: int, num_steps: int, num_waiting: int) -> dict[str, float]:
    """Medians over steps in which every request decodes."""
    scheduler = make_scheduler(num_rows, num_context, num_steps, num_waiting)
    times: list[tuple[float, float]] = []
    now_s = 0.0
    while len(times) < num_steps:
        start = perf_counter()
        plan = scheduler.schedule(now_s)
        assert plan is not None
        planned = perf_counter()
        result = answer(plan)
        ran = perf_counter()
        now_s += result.step_time_s
        scheduler.update(result, now_s)
        scheduler.take_updates()
        if len(plan.rows) == plan.num_tokens == num_rows:
            times.append((planned - start, perf_counter() - ran))
    schedule_us = 1e6 * sorted(time for time, _ in times)[num_steps // 2]
    update_us = 1e6 * sorted(time for _, time in times)[num_steps // 2]
    return {
        "rows": num_rows,
        "schedule_us": round(schedule_us, 1),
        "update_us": round(update_us, 1),
        "step_us": round(schedule_us + update_us, 1),
        "us_per_row": round((schedule_us + update_us) / num_rows, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--waiting", type=int, default=64)
    options = parser.parse_args()
    for num_rows in options.rows:
        print(json.dumps(measure(num_rows, options.context, options.steps, options.waiting)))


if __name__ == "__main__":
    main()
