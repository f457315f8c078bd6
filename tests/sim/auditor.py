"""Judges a schedule by what reached the servers: results, dead letters, commits, events; it decodes them by itself.

It looks while the schedule runs (what is committed must be durable at that moment) and once more at its end.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import orjson

from tests.sim.broker import BrokerObserver, Partition, Record
from tests.sim.decoding import decode_map, job_id_of
from tests.sim.ownership import Ownership
from tests.sim.redis_server import RedisObserver
from tests.sim.stream_audit import StreamAudit
from tests.sim.workload import Kind, Submission, Workload

ORIGIN_HEADERS = ("tailrace-dl-topic", "tailrace-dl-partition", "tailrace-dl-offset")
REFUSED = (Kind.UNREADABLE, Kind.INVALID)
"""Their records go to the dead letters."""


class Auditor(BrokerObserver, RedisObserver):
    def __init__(
        self,
        workload: Workload,
        topics: tuple[str, str],
        ownership: Ownership,
        now_s: Callable[[], float],
        note: Callable[[str], None],
        *,
        forgets: bool,
    ) -> None:
        """`topics`: of results and dead letters. `forgets`: Redis loses its memory in this schedule."""
        self._workload = workload
        self._results_topic, self._letters_topic = topics
        self._ownership = ownership
        self._now_s = now_s
        self._note = note
        self._forgets = forgets
        self.violations: list[str] = []
        self.by_origin: dict[tuple[str, int, int], Submission] = {}
        self.results: dict[str, list[bytes]] = defaultdict(list)
        self._letters: set[tuple[str, int, int]] = set()
        self._decided: dict[str, set[bytes]] = defaultdict(set)
        self._ended: dict[str, str] = {}
        self._streams: dict[str, StreamAudit] = {}
        self._terminal: set[Submission] = set()
        self._floor: dict[Partition, int] = {}
        """What was committed when the group's generation began."""
        self._covered: set[tuple[str, int, int]] = set()
        """Records that a commit calls complete."""
        self._same_id: dict[str, list[Submission]] = defaultdict(list)
        for submission in workload.submissions:
            self._same_id[submission.job_id].append(submission)

    def report(self, guarantee: str, what: str) -> None:
        self._note(f"VIOLATION {guarantee}: {what}")
        self.violations.append(f"{guarantee}: {what}")

    # What the broker sees

    def appended(self, record: Record) -> None:
        if record.topic == self._results_topic:
            self._result(record)
        elif record.topic == self._letters_topic:
            headers = dict(record.headers)
            topic, partition, offset = (headers[name].decode() for name in ORIGIN_HEADERS)
            self._letters.add((topic, int(partition), int(offset)))
            self._note(f"dead letter of {topic}/{partition}/{offset}")
            submission = self.by_origin.get((topic, int(partition), int(offset)))
            if submission is None or submission.value != record.value:
                self.report("G1", f"the dead letter of {topic}/{partition}/{offset} has other bytes")

    def committed(self, partition: Partition, offset: int, metadata: str) -> None:
        self._note(f"commit {partition[1]}: {offset} {metadata}")
        if offset < self._floor.get(partition, 0):
            self.report(
                "G3", f"the commit of {partition} goes back from {self._floor[partition]} to {offset}"
            )
        ranges = list(decode_map(offset, metadata))
        for origin, submission in self.by_origin.items():
            if origin[:2] != partition or origin in self._covered:
                continue
            in_map = any(first <= origin[2] < end for first, end in ranges)
            if origin[2] < offset or in_map:
                self._covered.add(origin)
                if not self._is_safe(submission):
                    where = f"the map of {offset} lists" if in_map else f"the commit of {offset} passes"
                    self.report(
                        "G3", f"{where} {origin}, {submission.kind} {submission.job_id}, not terminal"
                    )

    def generation_began(self, commits: dict[Partition, tuple[int, str]]) -> None:
        self._floor = {partition: offset for partition, (offset, _) in commits.items()}

    def _check_owner(self, worker: str, job_id: str, what: str) -> None:
        partitions = {s.partition for s in self._same_id[job_id] if s.offset >= 0}
        if partitions and not any(self._ownership.may_begin(worker, p, self._now_s()) for p in partitions):
            self.report("G5", f"{worker} {what} {job_id}, whose partition it has lost")

    def _result(self, record: Record) -> None:
        assert record.key is not None
        assert record.value is not None
        job_id, value = record.key.decode(), record.value
        result = orjson.loads(value)
        self._note(f"result {job_id}: {result['status']} attempt {result['attempt']} of {result['worker']}")
        if result["id"] != job_id:
            self.report("G2", f"the result of {result['id']} has the key {job_id}")
        if value not in self._decided[job_id]:
            self.report("G2", f"the result of {job_id} was sent before it was decided")
        earlier = self.results[job_id]
        if (
            earlier
            and earlier[-1] != value
            and not self._may_differ(job_id, orjson.loads(earlier[-1]), result)
        ):
            self.report("G2", f"results of {job_id} differ: {earlier[-1].decode()} and {value.decode()}")
        earlier.append(value)

    def _may_differ(self, job_id: str, first: dict[str, Any], second: dict[str, Any]) -> bool:
        same_id = self._same_id[job_id]
        if len(same_id) > 1 and all(s.kind in (*REFUSED, Kind.UNSERVABLE) for s in same_id):
            return True  # each refusal replaces the one before
        if not self._forgets:
            return False
        if job_id in self._workload.cancels or any(
            s.deadline_s or s.kind is Kind.CONFLICTING for s in same_id
        ):
            return True
        first_texts, second_texts = ([c["text"] for c in r["choices"]] for r in (first, second))
        return first["status"] == second["status"] and first_texts == second_texts

    # What Redis sees

    def added(self, key: bytes, event: bytes) -> None:
        stream = self._stream(key)
        if stream is not None:
            self._note(f"log {event.decode()}")
            if b'"kind":"start"' in event:
                self._check_owner(orjson.loads(event)["worker"], stream.job_id, "begins")
            stream.added(event)
            if stream.end is not None:
                self._compare_end(stream)

    def published(self, channel: bytes, message: bytes) -> None:
        stream = self._stream(channel)
        if stream is not None:
            stream.published(message)

    def set_fields(self, key: bytes, values: dict[bytes, bytes]) -> None:
        job_id = job_id_of(key)
        if job_id is None:
            return
        if b"decided" in values:
            self._decided[job_id].add(values[b"decided"])
        if b"ended" in values:
            self._ended[job_id] = values[b"ended"].decode()
            self._note(f"ended {job_id}: {self._ended[job_id]}")
            if not self.results[job_id]:
                self.report("G2", f"{job_id} has ended and no result is durable")

    def forgot(self) -> None:
        self._note("redis forgot everything")
        for stream in self._streams.values():
            stream.forgot()

    def evicted(self, key: bytes) -> None:
        self._note(f"redis evicts {key.decode()}")
        stream = self._stream(key)
        if stream is not None:
            stream.forgot()

    def _stream(self, key: bytes) -> StreamAudit | None:
        job_id = job_id_of(key)
        if job_id is None:
            return None
        stream = self._streams.get(job_id)
        if stream is None:
            stream = self._streams[job_id] = StreamAudit(job_id, self.report)
            same_id = self._same_id[job_id]
            stream.may_begin_anew = self._forgets or any(
                s.kind in (*REFUSED, Kind.UNSERVABLE) for s in same_id
            )
        return stream

    def _compare_end(self, stream: StreamAudit) -> None:
        if not self.results[stream.job_id] or stream.end is None:
            return  # reported where the end is noted
        result = orjson.loads(self.results[stream.job_id][-1])
        if stream.end["status"] != result["status"]:
            self.report(
                "G2",
                f"{stream.job_id}: the stream says {stream.end['status']}, the result {result['status']}",
            )
        for choice in result["choices"]:
            text = stream.text(choice["index"])
            if text != choice["text"]:
                self.report("G4", f"{stream.job_id}: the stream has {text!r}, the result {choice['text']!r}")

    # What must hold

    def _is_safe(self, submission: Submission) -> bool:
        """Whether the record's offset may be committed: it is terminal, or another record of the same bytes, which is
        not committed, still brings the result."""
        if self.is_terminal(submission):
            return True
        return submission.kind not in REFUSED and any(
            other is not submission
            and other.value == submission.value
            and other.offset >= 0
            and (*other.partition, other.offset) not in self._covered
            for other in self._same_id[submission.job_id]
        )

    def is_terminal(self, submission: Submission) -> bool:
        if submission not in self._terminal and self._is_terminal_now(submission):
            self._terminal.add(submission)
        return submission in self._terminal

    def _is_terminal_now(self, submission: Submission) -> bool:
        origin = (*submission.partition, submission.offset)
        suffix = "{}:{}:{}".format(*origin)
        if submission.kind in REFUSED:
            ids = (submission.job_id, f"unparsed:{suffix}")
            return origin in self._letters and any(self.results[i] and i in self._ended for i in ids)
        job_id = submission.job_id
        if origin in self._letters and (self.results[f"duplicate:{suffix}"] or not self._forgets):
            return bool(self.results[f"duplicate:{suffix}"])
        return job_id in self._ended and any(self._fits(submission, value) for value in self.results[job_id])

    def _fits(self, submission: Submission, value: bytes) -> bool:
        """Whether a result may be this record's and no other one's with its id."""
        result = orjson.loads(value)
        if result["status"] != "completed":
            return all(submission.whole_text.startswith(choice["text"]) for choice in result["choices"])
        return all(choice["text"] == submission.whole_text for choice in result["choices"])

    def is_covered(self, submission: Submission) -> bool:
        return (*submission.partition, submission.offset) in self._covered

    def finish(self) -> None:
        """Checks what must hold at the end of a schedule in which everything has settled."""
        for submission in self._workload.submissions:
            if not self.is_terminal(submission):
                self.report("G1", f"{submission.kind} {submission.job_id} has no terminal record")
        for stream in self._streams.values():
            stream.check_all_published()
            if stream.end is not None:
                self._compare_end(stream)
        for job_id, values in list(self.results.items()):
            if values:
                self._check_result(job_id, orjson.loads(values[-1]))

    def _check_result(self, job_id: str, result: dict[str, Any]) -> None:
        same_id = [s for s in self._same_id[job_id] if self._fits(s, orjson.dumps(result))]
        status = result["status"]
        if not self._same_id[job_id]:
            if job_id.split(":")[0] not in ("unparsed", "duplicate"):
                self.report("G1", f"{job_id} was never submitted and has a result")
            return
        kinds = {submission.kind for submission in self._same_id[job_id]}
        allowed = {"completed"}
        if kinds & {*REFUSED, Kind.UNSERVABLE}:
            allowed = {"failed", "rejected"}
        if job_id in self._workload.cancels:
            allowed.add("cancelled")
        if any(submission.deadline_s is not None for submission in self._same_id[job_id]):
            allowed.add("expired")
        if status not in allowed:
            self.report("G2", f"{job_id} ended {status}: {result.get('error')}")
        elif not same_id and status not in ("failed", "rejected"):
            self.report("G6", f"the text of {job_id} is not the model's: {result['choices']}")
        for submission in same_id:
            if status == "completed" and len(result["choices"]) != submission.num_choices:
                self.report("G1", f"{job_id} has {len(result['choices'])} choices")
        self._check_cancel(job_id, status)

    def _check_cancel(self, job_id: str, status: str) -> None:
        """A cancellation that was requested before the job was submitted is always honoured."""
        at_s = self._workload.cancels.get(job_id)
        same_id = self._same_id[job_id]
        if at_s is None or self._forgets or any(s.kind is not Kind.PLAIN for s in same_id):
            return
        if all(at_s < s.at_s for s in same_id) and status != "cancelled":
            self.report("G7", f"{job_id} was cancelled before it began and ended {status}")
