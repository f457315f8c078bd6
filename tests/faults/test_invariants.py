"""Each invariant is broken by one small trace, and by none of the others."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness.auditor import Commit, Terminal, Traces
from tests.faults.harness.invariants import Run, judge
from tests.faults.harness.ledger import Ledger

Event = dict[str, Any]


def result(text: str = "abc", status: str = "completed", offset: int = 0, worker: str = "w") -> Terminal:
    body = {"id": "job", "status": status, "choices": [{"index": 0, "text": text}], "worker": worker}
    return Terminal(offset, "job", json.dumps(body).encode(), 0.0)


def log(text: str = "abc", epoch: int = 7) -> list[Event]:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return [
        {"id": "job", "kind": "start", "epoch": epoch, "seq": 0, "resumed_tokens": [0]},
        {"id": "job", "kind": "delta", "epoch": epoch, "seq": 1, "text": text, "token_ids": [1, 2, 3], "index": 0},
        {
            "id": "job", "kind": "end", "epoch": epoch, "seq": 2, "status": "completed", "events": 3,
            "text_sha256": [digest],
        },
    ]  # fmt: skip


def heard(events: list[Event]) -> dict[str, list[tuple[float, Event]]]:
    return {"job": [(0.0, event) for event in events]}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Nothing is wrong with it."""
    ledger = Ledger(tmp_path / "ledger")
    ledger.acknowledge("job", {"id": "job"}, 0, 0)
    ledger.close()
    traces = Traces([result()], [], [Commit(0, 1, (), 1, 0)], heard(log()), {"job": log()})
    return Run(ledger, traces, {"job": ["abc"]})


def violated(run: Run) -> set[str]:
    return {violation.invariant for violation in judge(run)}


def test_a_run_without_a_fault_violates_nothing(run: Run) -> None:
    assert violated(run) == set()


def with_log(run: Run, change: Callable[[list[Event]], Any]) -> Run:
    events = log()
    change(events)
    run.traces.logs["job"] = events
    run.traces.live = heard(events)
    return run


def second_attempt(resumed: int) -> Callable[[list[Event]], None]:
    def change(events: list[Event]) -> None:
        end = events.pop()
        events.append({"id": "job", "kind": "start", "epoch": 8, "seq": 0, "resumed_tokens": [resumed]})
        events.append(end | {"epoch": 8, "seq": 1, "events": 2})

    return change


BROKEN: dict[str, tuple[Callable[[Run], Run], set[str]]] = {
    "no answer": (
        lambda run: replace(run, traces=replace(run.traces, results=[], logs={}, live={})),
        {"no loss", "offset safety"},
    ),
    "gave up waiting": (lambda run: replace(run, unended={"job"}), {"liveness"}),
    "two outcomes": (
        lambda run: replace(run, traces=replace(run.traces, results=[result(worker="v"), result()])),
        {"one outcome"},
    ),
    "another text": (lambda run: replace(run, texts={"job": ["abd"]}), {"right text"}),
    "no beginning": (
        lambda run: replace(run, traces=replace(run.traces, results=[result("x", "cancelled")], logs={}, live={})),
        {"right text"},
    ),
    "another status": (lambda run: replace(run, expected_status={"job": "cancelled"}), {"right status"}),
    "a hole": (lambda run: with_log(run, lambda events: events.pop(1)), {"stream truth"}),
    "two ends": (lambda run: with_log(run, lambda events: events.append(events[-1])), {"stream truth"}),
    "nothing logged": (lambda run: with_log(run, lambda events: events.clear()), {"stream truth"}),
    "a wrong hash": (lambda run: with_log(run, lambda events: events[2].update(text_sha256=["0"])), {"stream truth"}),
    "an older epoch after a newer one": (
        lambda run: with_log(run, lambda events: events[1].update(epoch=6)),
        {"stream truth"},
    ),
    "work done again": (
        lambda run: with_log(run, second_attempt(2)),
        {"stream truth", "work is kept"},
    ),
    "work invented": (lambda run: with_log(run, second_attempt(4)), {"stream truth", "work is kept"}),
    "an interruption": (lambda run: with_log(replace(run, undisturbed=True), second_attempt(3)), {"one attempt"}),
    "an event not heard": (
        lambda run: replace(run, traces=replace(run.traces, live=heard(log()[:2]))),
        {"live is log"},
    ),
    "committed early": (
        lambda run: replace(run, traces=replace(run.traces, commits=[Commit(0, 1, (), 0, 0), Commit(0, 1, (), 1, 0)])),
        {"offset safety"},
    ),
    "in the map early": (
        lambda run: replace(
            run, traces=replace(run.traces, commits=[Commit(0, 0, ((0, 1),), 0, 0), Commit(0, 1, (), 1, 0)])
        ),
        {"offset safety"},
    ),
    "never committed": (
        lambda run: replace(run, traces=replace(run.traces, commits=[Commit(0, 0, (), 1, 0)])),
        {"all committed"},
    ),
    "an immortal key": (
        lambda run: replace(run, traces=replace(run.traces, immortal_keys=["key"])),
        {"no leaks"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(run: Run, case: str) -> None:
    change, expected = BROKEN[case]
    assert violated(change(run)) == expected


def test_a_resumed_job_violates_nothing(run: Run) -> None:
    assert violated(with_log(run, second_attempt(3))) == set()


def test_a_log_that_redis_forgot_is_judged_by_what_is_left(run: Run) -> None:
    late = with_log(replace(run, redis_forgets=True), lambda events: events.pop(0))
    assert violated(late) == set()
