"""What must hold after a run, whatever happened in it: the guarantees of the contract, compared trace by trace.

Each check returns one sentence per violation. A run in which Redis lost its memory is judged by what is left.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.faults.harness.auditor import Traces
from tests.faults.harness.ledger import Ledger

Texts = Mapping[str, list[str]]
"""By job: the whole text of each choice, from a run without faults."""


@dataclass
class Run:
    """What a run has left for the judge."""

    ledger: Ledger
    traces: Traces
    texts: Texts
    redis_forgets: bool = False
    live_interrupted: bool = False
    unended: set[str] = field(default_factory=set)
    leaks: list[str] = field(default_factory=list)
    """Found by the run itself: exit codes, blocks, connections."""
    may_be_answered_twice: frozenset[str] = frozenset()
    """Ids under which several records were sent on purpose."""
    expected_status: Mapping[str, str] = field(default_factory=dict)
    """Of jobs that the run knows the outcome of."""
    undisturbed: bool = False


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: str
    detail: str


def judge(run: Run) -> list[Violation]:
    return [Violation(name, detail) for name, check in CHECKS.items() for detail in check(run)]


def _no_loss(run: Run) -> Iterator[str]:
    answered = {record.job_id for record in run.traces.results}
    for job_id in run.ledger.bodies:
        if job_id not in answered:
            yield f"{job_id} was acknowledged and has no terminal record"


def _liveness(run: Run) -> Iterator[str]:
    for job_id in sorted(run.unended):
        yield f"{job_id} had not ended when the run gave up waiting"


def _equal_records(run: Run) -> Iterator[str]:
    by_job: dict[str, set[bytes]] = defaultdict(set)
    for record in run.traces.results:
        by_job[record.job_id].add(record.value)
    for job_id, values in by_job.items():
        if len(values) > 1 and job_id not in run.may_be_answered_twice:
            yield f"{job_id} has {len(values)} different terminal records"


def _right_text(run: Run) -> Iterator[str]:
    """A completed job has the text of the run without faults, an interrupted one a beginning of it."""
    for record in run.traces.results:
        expected, body = run.texts.get(record.job_id), record.body
        if expected is None:
            continue
        texts = [choice["text"] for choice in body.get("choices", [])]
        if body["status"] == "completed":
            if texts != expected:
                yield f"{record.job_id} completed with another text than without faults"
        elif not all(whole.startswith(text) for text, whole in zip(texts, expected, strict=False)):
            yield f"{record.job_id} is {body['status']} and its text is no beginning of the right one"


def _right_status(run: Run) -> Iterator[str]:
    """Jobs that were cancelled first, whose deadline is past or far, and records that are no jobs."""
    for record in run.traces.results:
        expected, status = run.expected_status.get(record.job_id), record.body["status"]
        if expected is not None and status != expected:
            yield f"{record.job_id} should be {expected} and is {status}"
        if run.ledger.bodies.get(record.job_id) == {} and status not in ("failed", "rejected"):
            yield f"{record.job_id} is no job and is {status}"


def _whole_streams(run: Run) -> Iterator[str]:
    for job_id, events in run.traces.logs.items():
        records = [record for record in run.traces.results if record.job_id == job_id]
        if run.ledger.bodies.get(job_id, {}).get("stream", True) and records:
            for problem in _problems_of_log(run, events, records[-1].body):
                yield f"{job_id}: {problem}"


def _problems_of_log(run: Run, events: list[dict[str, Any]], result: dict[str, Any]) -> Iterator[str]:
    if run.redis_forgets and (not events or events[0]["seq"] != 0 or events[0]["kind"] != "start"):
        return  # its beginning is gone: readers see a gap, and the result has the text
    if not events:
        yield "its log is empty"
        return
    ends = [event for event in events if event["kind"] == "end"]
    if len(ends) != 1 or events[-1]["kind"] != "end":
        yield f"its log has {len(ends)} ends, and {events[-1]['kind']} stands last"
        return
    epoch, seq = -1, -1
    choices: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for event in events:
        if event["epoch"] < epoch:
            yield f"an event of the older epoch {event['epoch']} stands after one of {epoch}"
            return
        if event["epoch"] > epoch:
            if event["kind"] != "start" or event["seq"] != 0:
                yield f"epoch {event['epoch']} begins with seq {event['seq']} and kind {event['kind']}"
                return
            epoch, seq = event["epoch"], -1
        if event["seq"] != seq + 1:
            yield f"seq {event['seq']} stands after {seq} in epoch {epoch}"
            return
        seq = event["seq"]
        problem = _apply(event, choices)
        if problem:
            yield problem
            return
    yield from _problems_of_end(ends[0], seq, choices, result)


def _apply(event: dict[str, Any], choices: dict[int, list[tuple[str, int]]]) -> str | None:
    """Adds an event to the (text, number of tokens) pieces of each choice; returns what is wrong with it."""
    if event["kind"] == "delta":
        choices[event.get("index", 0)].append((event["text"], len(event.get("token_ids") or ())))
    if event["kind"] == "start":
        for index, kept in enumerate(event.get("resumed_tokens") or ()):
            logged = sum(count for _, count in choices[index])
            if kept > logged:
                return f"epoch {event['epoch']} resumes {kept} tokens of choice {index}; {logged} are logged"
            if kept < logged and kept != 0:
                return f"epoch {event['epoch']} does {logged - kept} logged tokens of choice {index} again"
            if kept == 0:
                choices[index].clear()
    return None


def _problems_of_end(
    end: dict[str, Any], seq: int, choices: dict[int, list[tuple[str, int]]], result: dict[str, Any]
) -> Iterator[str]:
    if end["events"] != seq + 1:
        yield f"its end counts {end['events']} events of {seq + 1}"
    if end["status"] != result["status"]:
        yield f"its end says {end['status']} and its result {result['status']}"
    for choice in result.get("choices", []):
        text = "".join(piece for piece, _ in choices[choice["index"]])
        if text != choice["text"]:
            yield f"the joined text of choice {choice['index']} is not that of its result"
        if hashlib.sha256(text.encode()).hexdigest() != end["text_sha256"][choice["index"]]:
            yield f"the hash of choice {choice['index']} in its end is not that of the joined text"


def _work_is_kept(run: Run) -> Iterator[str]:
    """An attempt goes on from everything that the one before had logged, unless the log was lost."""
    if run.redis_forgets:
        return
    for job_id, events in run.traces.logs.items():
        logged: dict[int, int] = defaultdict(int)
        for event in events:
            if event["kind"] == "delta":
                logged[event.get("index", 0)] += len(event.get("token_ids") or ())
            elif event["kind"] == "start":
                for index, kept in enumerate(event.get("resumed_tokens") or ()):
                    if kept != logged[index]:
                        yield f"{job_id}: {logged[index]} tokens were logged and {kept} are kept"
                    logged[index] = kept


def _one_attempt(run: Run) -> Iterator[str]:
    for job_id, events in run.traces.logs.items() if run.undisturbed else ():
        num_attempts = len({event["epoch"] for event in events})
        if num_attempts > 1:
            yield f"{job_id} took {num_attempts} attempts although nothing was wrong"


def _live_is_log(run: Run) -> Iterator[str]:
    if run.redis_forgets or run.live_interrupted:
        return
    for job_id, events in run.traces.logs.items():
        heard = [event for _, event in run.traces.live.get(job_id, [])]
        if heard != events and job_id not in run.may_be_answered_twice:
            yield f"{job_id}: {len(heard)} events were heard live and {len(events)} are in the log"


def _safe_offsets(run: Run) -> Iterator[str]:
    """At every sample, each record below the committed offset or in the map had its answer on a topic."""
    first_result: dict[str, int] = {}
    for record in run.traces.results:
        first_result.setdefault(record.job_id, record.offset)
    letters = {(partition, offset): at for at, partition, offset in run.traces.dead_letters}
    first_sent = {sent.job_id: sent for sent in reversed(run.ledger.sent)}
    # A copy of a record is complete once it is known to be one: the first of them gets the answer.
    for sent in first_sent.values():
        for commit in run.traces.commits:
            if commit.partition == sent.partition and commit.covers(sent.offset):
                answered = first_result.get(sent.job_id, commit.results_end) < commit.results_end
                refused = letters.get((sent.partition, sent.offset), commit.dead_end) < commit.dead_end
                if not answered and not refused:
                    yield f"{sent.job_id} at {sent.partition}:{sent.offset} was committed before its answer"
                break


def _everything_committed(run: Run) -> Iterator[str]:
    last = {commit.partition: commit for commit in run.traces.commits}
    for sent in run.ledger.sent:
        commit = last.get(sent.partition)
        if not run.unended and (commit is None or commit.offset <= sent.offset):
            yield f"{sent.job_id} at {sent.partition}:{sent.offset} is not committed at the end"


def _no_leaks(run: Run) -> Iterator[str]:
    yield from run.leaks
    for key in run.traces.immortal_keys:
        yield f"the key {key} never expires"


CHECKS: dict[str, Callable[[Run], Iterable[str]]] = {
    "no loss": _no_loss,
    "liveness": _liveness,
    "one outcome": _equal_records,
    "right text": _right_text,
    "right status": _right_status,
    "stream truth": _whole_streams,
    "work is kept": _work_is_kept,
    "one attempt": _one_attempt,
    "live is log": _live_is_log,
    "offset safety": _safe_offsets,
    "all committed": _everything_committed,
    "no leaks": _no_leaks,
}
