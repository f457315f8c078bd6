"""Runs the fault suite: `bash ops/faults --help`."""

import argparse
import asyncio
import json
import logging
import sys
from collections import defaultdict
from pathlib import Path

from tests.faults.harness.catalogue import FAULTS
from tests.faults.harness.runs import Outcome, quantile
from tests.faults.harness.suite import Suite, Task


def main() -> int:
    parser = argparse.ArgumentParser(prog="ops/faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each fault (default: 3)")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="only this one; repeatable")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the others count on from it")
    parser.add_argument("--parallel", type=int, default=4, help="runs at a time (default: 4)")
    parser.add_argument("--controls", action="store_true", help="also without the mechanism of each fault")
    parser.add_argument("--keep", type=Path, help="folder for logs of runs that did not go as they should")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # aiokafka's, about the servers that the faults stop
    faults = [FAULTS[name] for name in arguments.fault or FAULTS]
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    tasks = [Task(fault, seed) for seed in seeds for fault in faults]
    if arguments.controls:
        tasks += [Task(fault, seed, (fault.control,)) for seed in seeds for fault in faults if fault.control]
    return asyncio.run(_run(tasks, arguments))


async def _run(tasks: list[Task], arguments: argparse.Namespace) -> int:
    pairs: list[tuple[Task, Outcome]] = []

    def report(task: Task, outcome: Outcome) -> None:
        pairs.append((task, outcome))
        if not arguments.json:
            _print_one(task, outcome)

    async with Suite(parallel=arguments.parallel, keep=arguments.keep) as suite:
        await suite.run(tasks, report)
    rows = _rows(pairs)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(row)
    return int(any(outcome.violations for task, outcome in pairs if not task.without))


def _print_one(task: Task, outcome: Outcome) -> None:
    without = f" without {task.without[0]}" if task.without else ""
    state = f"{len(outcome.violations)} violations" if outcome.violations else "ok"
    print(f"{outcome.fault}{without}, seed {outcome.seed}: {state}, {outcome.duration_s:.1f} s", flush=True)
    for violation in outcome.violations[:3]:
        print(f"    {violation.invariant}: {violation.detail}", flush=True)


def _rows(pairs: list[tuple[Task, Outcome]]) -> list[dict[str, object]]:
    by_fault: dict[tuple[str, tuple[str, ...]], list[Outcome]] = defaultdict(list)
    for task, outcome in pairs:
        by_fault[task.fault.name, tuple(task.without)].append(outcome)
    return [
        {
            "fault": name,
            "without": list(without),
            "seeds": sorted(outcome.seed for outcome in outcomes),
            "runs_with_violations": sum(bool(outcome.violations) for outcome in outcomes),
            "jobs": sum(outcome.num_jobs for outcome in outcomes),
            "raw_duplicates": sum(outcome.num_duplicates for outcome in outcomes),
            "recovery_p50_s": round(quantile([s for o in outcomes for s in o.recovery_s], 0.5), 2),
            "recovery_p99_s": round(quantile([s for o in outcomes for s in o.recovery_s], 0.99), 2),
        }
        for (name, without), outcomes in by_fault.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
