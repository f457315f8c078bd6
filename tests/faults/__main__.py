"""Runs the fault suite: `bash ops/faults --help`."""

import argparse
import asyncio
import json
import logging
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.faults.harness.catalogue import FAULTS
from tests.faults.harness.directed import CONTROLS, Scene, all_scenes
from tests.faults.harness.report import report
from tests.faults.harness.runs import Outcome, quantile
from tests.faults.harness.suite import Suite, Task, fault_task, quick_tasks, scene_task


def main() -> int:
    parser = argparse.ArgumentParser(prog="ops/faults", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="each fault once and a part of the directed search"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each fault, seed after seed (default: 3)"
    )
    parser.add_argument(
        "--fault", action="append", help="only faults and scenes whose name contains this; repeatable"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first run (default: 1)")
    parser.add_argument("--parallel", type=int, default=6, help="runs at a time (default: 6)")
    parser.add_argument(
        "--control-runs", type=int, default=1, help="runs without each mechanism (default: 1)"
    )
    parser.add_argument("--keep", type=Path, help="folder for logs of runs that did not go as they should")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after this long")
    parser.add_argument("--report", type=Path, help="write the figures to this page")
    parser.add_argument("--json", action="store_true", help="print figures of all faults at the end, as JSON")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # aiokafka's, about the servers that the faults stop
    tasks = _tasks(arguments)
    if not tasks:
        parser.error(f"no fault is called {' or '.join(arguments.fault)}; there are: {', '.join(FAULTS)}")
    return asyncio.run(_run(tasks, arguments))


def _tasks(arguments: argparse.Namespace) -> list[Task]:
    if arguments.quick:
        tasks = quick_tasks(arguments.seed)
    else:
        first = arguments.seed
        tasks = [scene_task(scene) for scene in all_scenes()]
        tasks += [scene_task(Scene(*scene), without=without) for without, scene in CONTROLS.items()]
        tasks += [
            fault_task(each, seed, control=True)
            for seed in range(first, first + arguments.control_runs)
            for each in FAULTS.values()
            if each.control
        ]
        tasks += [
            fault_task(each, seed)
            for seed in range(first, first + arguments.runs)
            for each in FAULTS.values()
        ]
    wanted = arguments.fault or [""]
    return [task for task in tasks if any(word in task.name for word in wanted)]


async def _run(tasks: list[Task], arguments: argparse.Namespace) -> int:
    pairs: list[tuple[Task, Outcome]] = []

    def note(task: Task, outcome: Outcome) -> None:
        pairs.append((task, outcome))
        if not arguments.json:
            _print_one(task, outcome)

    async with Suite(parallel=arguments.parallel, keep=arguments.keep) as suite:
        await suite.run(tasks, note, limit_s=60 * arguments.minutes)
    rows = _rows(pairs)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    if arguments.report is not None:
        arguments.report.write_text(report(rows, shlex.join(["ops/faults", *sys.argv[1:]])))
    wrong = [row for row in rows if _is_wrong(row)]
    for row in wrong:
        print(f"NOT AS IT SHOULD BE: {row}", file=sys.stderr)
    if not arguments.json:
        print(
            f"{len(pairs)} runs, {len(wrong)} of {len(rows)} faults, scenes and controls not as they should be"
        )
    return int(bool(wrong))


def _print_one(task: Task, outcome: Outcome) -> None:
    without = f", without {task.without}" if task.without else ""
    found = f"{len(outcome.violations)} violations" if outcome.violations else "no violation"
    print(f"{task.name}{without}, seed {task.seed}: {found}, {outcome.duration_s:.1f} s", flush=True)
    for violation in () if task.without else outcome.violations[:5]:
        print(f"    {violation.invariant}: {violation.detail}", flush=True)


def _rows(pairs: list[tuple[Task, Outcome]]) -> list[dict[str, Any]]:
    grouped: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for task, outcome in pairs:
        grouped[task.name, task.without].append(outcome)
    return [
        {
            "name": name,
            "without": without,
            "runs": len(outcomes),
            "seeds": [min(o.seed for o in outcomes), max(o.seed for o in outcomes)],
            "runs_with_violations": sum(bool(o.violations) for o in outcomes),
            "violated": sorted({v.invariant for o in outcomes for v in o.violations}),
            "jobs": sum(o.num_jobs for o in outcomes),
            "raw_duplicates": sum(o.num_duplicates for o in outcomes),
            "recovery_p50_s": round(quantile([s for o in outcomes for s in o.recovery_s], 0.5), 2),
            "recovery_p99_s": round(quantile([s for o in outcomes for s in o.recovery_s], 0.99), 2),
        }
        for (name, without), outcomes in grouped.items()
    ]


def _is_wrong(row: dict[str, Any]) -> bool:
    """A fault must break nothing in any run; a control must break something in one of them."""
    return bool(row["runs_with_violations"]) != bool(row["without"])


if __name__ == "__main__":
    sys.exit(main())
