"""Runs a target over many seeds, each within a bound of time and memory, and reports the inputs it fails on."""

import contextlib
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from types import FrameType
from typing import Any

from tests.fuzz.target import Target

TIME_LIMIT_S = 1.0
"""CPU seconds that one input may take: the largest record, 1 MiB, takes a few hundredths."""
MEMORY_LIMIT_BYTES = 256 << 20
"""What a process may hold beyond what it held when it began; the largest input has 1 MiB."""
MAX_FAULTS = 5


class OverTimeError(BaseException):
    """Not an Exception, so that no handler of the code under test takes it."""


@dataclass(frozen=True)
class Fault:
    target: str
    seed: int
    error: str
    case: str

    def __str__(self) -> str:
        return (
            f"{self.target}, seed {self.seed}: {self.error}\n  input: {self.case}\n"
            f"  replay: python -m tests.fuzz --target {self.target} --seed {self.seed} --inputs 1"
        )


@dataclass
class Report:
    """Of one target; several can be added up."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    """The most CPU seconds that one input took."""
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        self.inputs += other.inputs
        self.seconds += other.seconds
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.outcomes += other.outcomes
        self.faults += other.faults


def run(target: Target, seeds: range) -> Report:
    """Check one input for each seed; stops after a few faults."""
    report = Report(target.name)
    rng = Random()
    began_s = time.perf_counter()
    with bounded_time(), bounded_memory(), swallowed_errors() as swallowed, warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in seeds:
            rng.seed(seed)
            case = target.make(rng)
            fault = _fault_of(target, case, seed, report)
            report.inputs += 1
            if swallowed and fault is None:
                fault = Fault(target.name, seed, f"swallowed: {swallowed}", _shown(case))
            swallowed.clear()
            if fault is not None:
                report.faults.append(fault)
                if len(report.faults) >= MAX_FAULTS:
                    break
    report.seconds = time.perf_counter() - began_s
    return report


def _fault_of(target: Target, case: Any, seed: int, report: Report) -> Fault | None:
    began_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
    try:
        outcome = target.check(case)
    except OverTimeError:
        error = f"took more than {TIME_LIMIT_S} s"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as raised:  # Rust's panics are no Exceptions
        error = f"{type(raised).__name__}: {raised!s:.600}"
    else:
        error = ""
        report.outcomes[outcome] += 1
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    taken_s = time.process_time() - began_s
    report.slowest_s = max(report.slowest_s, taken_s)
    if not error and taken_s > TIME_LIMIT_S:
        error = f"took {taken_s:.2f} s; the limit is {TIME_LIMIT_S}"
    return Fault(target.name, seed, error, _shown(case)) if error else None


def _shown(case: Any) -> str:
    text = repr(case)
    return text if len(text) <= 4000 else f"{text[:4000]}… ({len(text)} characters)"


@contextlib.contextmanager
def bounded_time() -> Iterator[None]:
    """While it is open, `signal.setitimer(ITIMER_PROF)` ends what takes longer with an OverTimeError."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise OverTimeError

    before = signal.signal(signal.SIGPROF, end)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def swallowed_errors() -> Iterator[list[str]]:
    """Collects errors that native code could not raise and would print."""
    found: list[str] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda error: found.append(repr(error.exc_value))
    try:
        yield found
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """While it is open, an allocation far beyond what the process holds now is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held = _held_bytes()
    limit = held + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _held_bytes() -> int:
    """The private memory that RLIMIT_DATA counts, in use or only reserved."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
