"""`python -m tests.sim`: runs schedules and says which break a guarantee; replays one of them with its trace."""

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.sim.controls import CONTROLS
from tests.sim.world import Outcome, run_schedule

CHUNK = 50
COLLECT_EVERY = 10
"""Schedules between two garbage collections: collecting as Python does by itself takes a tenth of the time."""


@dataclass(slots=True)
class Summary:
    num_schedules: int = 0
    num_callbacks: int = 0
    simulated_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    violations: dict[int, list[str]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.num_schedules += 1
        self.num_callbacks += outcome.num_callbacks
        self.simulated_s += outcome.ended_s
        self.faults.update(outcome.counts)
        if outcome.violations:
            self.violations[outcome.seed] = outcome.violations


def run_chunk(work: tuple[range, str | None]) -> list[Outcome]:
    seeds, control = work
    gc.disable()
    outcomes = []
    for index, seed in enumerate(seeds):
        outcomes.append(run_schedule(seed, control=CONTROLS[control] if control else None))
        if index % COLLECT_EVERY == 0:
            gc.collect()
    return outcomes


def outcomes_of(seeds: range, num_processes: int, control: str | None) -> Iterator[Outcome]:
    chunks = [(seeds[begin : begin + CHUNK], control) for begin in range(0, len(seeds), CHUNK)]
    if num_processes == 1:
        for chunk in chunks:
            yield from run_chunk(chunk)
        return
    with get_context("fork").Pool(num_processes) as pool:
        for outcomes in pool.imap_unordered(run_chunk, chunks):
            yield from outcomes


def replay(seed: int, control: str | None) -> int:
    outcome = run_schedule(seed, traced=True, control=CONTROLS[control] if control else None)
    for entry in outcome.trace:
        print(entry)
    for violation in outcome.violations:
        print(f"seed {seed}: {violation}", file=sys.stderr)
    return int(bool(outcome.violations))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--schedules", type=int, default=None, help="how many; with --seed alone: one")
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule")
    parser.add_argument("--trace", action="store_true", help="replay one seed and print all that happens")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--control", choices=sorted(CONTROLS), help="with one mechanism switched off")
    options = parser.parse_args(arguments)
    if options.trace:
        return replay(options.seed, options.control)
    count = options.schedules or 1
    seeds = range(options.seed, options.seed + count)
    started_s = time.perf_counter()
    summary = Summary()
    for outcome in outcomes_of(seeds, min(options.processes, 1 + count // CHUNK), options.control):
        summary.add(outcome)
        for violation in outcome.violations[:3] if not options.json else ():
            print(f"seed {outcome.seed}: {violation[:400]}", flush=True)
    report(summary, time.perf_counter() - started_s, as_json=options.json)
    return int(bool(summary.violations))


def report(summary: Summary, took_s: float, *, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps(
                {
                    "schedules": summary.num_schedules,
                    "seconds": round(took_s, 1),
                    "simulated_s": round(summary.simulated_s, 1),
                    "callbacks": summary.num_callbacks,
                    "faults": dict(sorted(summary.faults.items())),
                    "violations": {str(seed): found for seed, found in sorted(summary.violations.items())},
                }
            )
        )
        return
    rate = summary.num_schedules / took_s
    faults = ", ".join(f"{name} {count}" for name, count in sorted(summary.faults.items()))
    print(f"{summary.num_schedules} schedules in {took_s:.1f} s, {rate:.1f} a second; faults: {faults}")
    print(f"{len(summary.violations)} schedules break a guarantee: {sorted(summary.violations)[:20]}")


if __name__ == "__main__":
    sys.exit(main())
