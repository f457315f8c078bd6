"""Fuzzes every parser: `python -m tests.fuzz [--inputs N] [--target NAME] [--seed S] [--json]`.

Inputs are shared out between two processes. A failing input is printed with the seed that makes it again; the exit
status is then 1.
"""

import argparse
import json
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.fuzz.run import MEMORY_LIMIT_BYTES, TIME_LIMIT_S, Report, run
from tests.fuzz.targets import TARGETS

NUM_PROCESSES = 2
CHUNK = 5_000


def run_chunk(name: str, first: int, count: int) -> tuple[Report, int]:
    """Also returns the process's largest resident memory in KiB."""
    report = run(TARGETS[name], range(first, first + count))
    return report, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def chunks(names: list[str], num_inputs: int, seed: int) -> list[tuple[str, int, int]]:
    """Share inputs out by each target's share, and each target's into chunks with seeds of their own."""
    shares = {name: TARGETS[name].share for name in names}
    total = sum(shares.values())
    parts = []
    for name in names:
        count = -(-round(num_inputs * shares[name] * 1000) // round(total * 1000))
        parts += [(name, seed + done, min(CHUNK, count - done)) for done in range(0, count, CHUNK)]
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="over all targets (default 1,000,000)")
    parser.add_argument("--target", choices=sorted(TARGETS), help="only this one")
    parser.add_argument("--seed", type=int, default=0, help="of the first input; the others follow it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = [options.target] if options.target else list(TARGETS)
    reports = {name: Report(name) for name in names}
    largest_kib = 0
    began_s = time.perf_counter()
    work = chunks(names, options.inputs, options.seed)
    with ProcessPoolExecutor(NUM_PROCESSES if len(work) > 1 else 1) as pool:
        for report, held_kib in pool.map(run_chunk, *zip(*work, strict=True)):
            if report.faults and not options.json:
                print(*report.faults, sep="\n", flush=True)
            reports[report.target].add(report)
            largest_kib = max(largest_kib, held_kib)
    seconds = time.perf_counter() - began_s
    (print_json if options.json else print_table)(list(reports.values()), seconds, largest_kib)
    return 1 if any(report.faults for report in reports.values()) else 0


def print_table(reports: list[Report], seconds: float, largest_kib: int) -> None:
    for report in reports:
        rate = report.inputs / max(report.seconds, 1e-9)
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(report.outcomes.items()))
        print(
            f"{report.target:12} {report.inputs:9,} inputs {rate:8,.0f}/s  slowest {report.slowest_s * 1000:6.1f} ms  "
            f"{outcomes}  {len(report.faults)} faults"
        )
    total = sum(report.inputs for report in reports)
    print(
        f"{total:,} inputs in {seconds:.0f} s: {total / seconds:,.0f}/s with {NUM_PROCESSES} processes of at most "
        f"{largest_kib / 1024:.0f} MiB; limits of one input: {TIME_LIMIT_S} s, {MEMORY_LIMIT_BYTES >> 20} MiB more"
    )


def print_json(reports: list[Report], seconds: float, largest_kib: int) -> None:
    document = {
        "inputs": sum(report.inputs for report in reports),
        "seconds": seconds,
        "largest_process_bytes": largest_kib * 1024,
        "targets": {
            report.target: {
                "inputs": report.inputs,
                "inputs_per_s": report.inputs / max(report.seconds, 1e-9),
                "slowest_s": report.slowest_s,
                "outcomes": dict(report.outcomes),
                "faults": [vars(fault) for fault in report.faults],
            }
            for report in reports
        },
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    sys.exit(main())
