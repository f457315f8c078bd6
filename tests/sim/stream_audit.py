"""Follows the stream of one job as its events enter the log, and says what no reader should ever see.

Decodes the events by itself: nothing of the product's stream or wire code judges here.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import orjson

Report = Callable[[str, str], None]
"""Guarantee and what is wrong."""

EMPTY_SHA256 = hashlib.sha256().hexdigest()


class StreamAudit:
    def __init__(self, job_id: str, report: Report) -> None:
        self.job_id = job_id
        self._report = report
        self._unpublished: list[bytes] = []
        self._top_epoch = 0
        """The highest epoch in the log, as far as Redis remembers."""
        self._next_seq = 0
        self._epochs: set[int] = set()
        self._interrupted: set[int] = set()
        """Epochs that Redis has forgotten: each may go on in a log that has lost its beginning."""
        self._parts: dict[int, list[tuple[int, str]]] = {}
        """Per choice: number of tokens after the part, its text."""
        self._epoch = 0
        """The attempt that `_parts` belongs to; unlike `_top_epoch` it survives a loss of memory."""
        self._position = 0
        self.end: dict[str, Any] | None = None
        self.may_begin_anew = False
        """Records with this id are refused, so that its stream may be followed by another record's."""

    def forgot(self) -> None:
        self._top_epoch, self._next_seq = 0, 0
        self._interrupted = set(self._epochs)

    def added(self, data: bytes) -> None:
        event = orjson.loads(data)
        self._unpublished.append(data)
        self._check_order(event)
        epoch, seq = event["epoch"], event["seq"]
        if (epoch, seq) < (self._epoch, self._position):
            return  # written again after a loss of memory; readers have it
        if self.end is not None and not (event["kind"] == "start" and self.may_begin_anew):
            self._say("G4", f"{event['kind']} {epoch}/{seq} follows the end of the stream")
        self._epoch, self._position = epoch, seq + 1
        match event["kind"]:
            case "start":
                self._start(event)
            case "delta":
                parts = self._parts.setdefault(event["index"], [])
                parts.append((self._num_tokens(event["index"]) + len(event["token_ids"]), event["text"]))
            case "end":
                self._end(event)

    def published(self, data: bytes) -> None:
        if not self._unpublished or self._unpublished.pop(0) != data:
            self._say("G4", "the live channel has another event than the log")

    def check_all_published(self) -> None:
        if self._unpublished:
            self._say("G4", f"{len(self._unpublished)} events of the log never reached the live channel")

    def text(self, index: int) -> str:
        return "".join(text for _, text in self._parts.get(index, ()))

    def _check_order(self, event: dict[str, Any]) -> None:
        epoch, seq = event["epoch"], event["seq"]
        if event["id"] != self.job_id:
            self._say("G4", f"an event of job {event['id']}")
        if epoch < self._top_epoch:
            self._say(
                "G5",
                f"{event['kind']} {epoch}/{seq} of an older attempt after the start of {self._top_epoch}",
            )
            return
        if epoch in self._interrupted:
            self._interrupted.discard(epoch)
            self._next_seq = seq
        elif epoch > self._top_epoch:
            self._next_seq = 0
            if event["kind"] != "start":
                self._say("G4", f"{event['kind']} {epoch}/{seq} comes before its start")
        elif event["kind"] == "start":
            self._say("G4", f"attempt {epoch} starts twice")
        if seq != self._next_seq:
            self._say("G4", f"seq {seq} of {epoch} instead of {self._next_seq}")
        self._epochs.add(epoch)
        self._top_epoch, self._next_seq = epoch, seq + 1

    def _num_tokens(self, index: int) -> int:
        parts = self._parts.get(index)
        return parts[-1][0] if parts else 0

    def _start(self, event: dict[str, Any]) -> None:
        self.end = None
        for index, count in enumerate(event["resumed_tokens"]):
            parts = self._parts.get(index, [])
            self._parts[index] = [part for part in parts if part[0] <= count] if count else []
            if self._num_tokens(index) != count:
                self._say("G6", f"attempt {event['epoch']} continues after {count} tokens that no reader has")

    def _end(self, event: dict[str, Any]) -> None:
        self.end = event
        if event["events"] != event["seq"] + 1:
            self._say("G4", f"the end counts {event['events']} events, its seq is {event['seq']}")
        for index, expected in enumerate(event["text_sha256"]):
            if hashlib.sha256(self.text(index).encode()).hexdigest() != expected:
                self._say("G4", f"choice {index} has another hash than its text {self.text(index)!r}")

    def _say(self, guarantee: str, what: str) -> None:
        self._report(guarantee, f"stream of {self.job_id}: {what}")
