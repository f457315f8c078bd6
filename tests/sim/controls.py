"""Mechanisms of the product, each switched off in turn: the auditor must notice every one of them.

Some mechanisms are not here, because others keep the guarantees without them: stale completions are ignored, a member
that missed a generation starts over, and sends are withdrawn. Each saves work that would be done twice.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

from service.ingest.offsets import PartitionOffsets, encode_completed
from service.stream import keys
from service.stream.keys import Script, append_script
from service.stream.publisher import StreamPublisher
from service.stream.writer import AttemptWriter
from service.worker.completion import Completion
from service.worker.job_flow import JobFlow
from service.worker.outcome import ending_of

Control = Callable[[], AbstractContextManager[None]]
NEVER_CLOSES = "\nlocal held_epoch = tonumber(held[1] or -1)\nlocal epoch = tonumber(ARGV[1])\n"
IN_LOG = "local next_seq = tonumber(held[3] or 0)"


def _changed(script: Script, old: str, new: str) -> Script:
    source = script.source.decode()
    assert old in source, f"the script has changed: {old}"
    return Script.of(source.replace(old, new))


@contextlib.contextmanager
def _appending(script: Script) -> Iterator[None]:
    with patch("service.worker.assembly.StreamPublisher", partial(StreamPublisher, append=script)):
        yield


def no_fence() -> AbstractContextManager[None]:
    """Any attempt may write to the log."""
    return _appending(append_script(NEVER_CLOSES))


@contextlib.contextmanager
def ignores_decided_record() -> Iterator[None]:
    """An attempt that takes a job over is not told what an earlier one has decided."""
    deaf = _changed(keys.OPEN, "held[11] or ''", "''")
    with patch("service.stream.publisher.OPEN", deaf), patch("service.stream.server_check.OPEN", deaf):
        yield


@contextlib.contextmanager
def ignores_cancel_key() -> Iterator[None]:
    """A cancellation that was requested before the job was opened is not seen."""
    deaf = _changed(keys.OPEN, "redis.call('EXISTS', KEYS[2])", "0")
    with patch("service.stream.publisher.OPEN", deaf), patch("service.stream.server_check.OPEN", deaf):
        yield


def no_count_of_events() -> AbstractContextManager[None]:
    """Events that are in the log already are written again after a lost reply."""
    return _appending(_changed(keys.APPEND, IN_LOG, "local next_seq = tonumber(ARGV[13])"))


@contextlib.contextmanager
def commits_the_newest() -> Iterator[None]:
    """The commit does not stop at the first incomplete offset."""

    def committable(self: PartitionOffsets) -> tuple[int, str]:
        return self.next_offset, ""

    with patch.object(PartitionOffsets, "committable", committable):
        yield


@contextlib.contextmanager
def map_lists_incomplete() -> Iterator[None]:
    """The map lists all offsets above the first incomplete one."""

    def committable(self: PartitionOffsets) -> tuple[int, str]:
        offset = next(iter(self._incomplete), self.next_offset)
        ranges = [(offset + 1, self.next_offset)] if self.next_offset > offset + 1 else []
        return offset, encode_completed(offset, ranges)

    with patch.object(PartitionOffsets, "committable", committable):
        yield


@contextlib.contextmanager
def ignores_lost_partitions() -> Iterator[None]:
    """The worker goes on with the jobs of partitions that it has lost."""
    with patch.object(JobFlow, "on_lost", lambda self, partitions: None):
        yield


@contextlib.contextmanager
def ends_before_the_result() -> Iterator[None]:
    """The end event goes out before the result is durable."""

    async def tell(self: Completion, run: Any, stream: AttemptWriter, result: Any, record: bytes) -> bool:
        if not await stream.end(ending_of(result)):
            return False
        await self._send_result(run, result.id, record)
        self.settle(run)
        return True

    with patch.object(Completion, "_tell", tell):
        yield


@contextlib.contextmanager
def completes_before_the_result() -> Iterator[None]:
    """The offset is complete as soon as the outcome is decided."""
    tell = Completion._tell

    async def settled(self: Completion, run: Any, *args: Any) -> bool:
        self._edges.complete(run.delivery)
        return await tell(self, run, *args)

    with patch.object(Completion, "_tell", settled):
        yield


@contextlib.contextmanager
def requests_stay() -> Iterator[None]:
    """The requests of an abandoned job are not ended."""
    with patch.object(JobFlow, "_stop_requests", lambda self, run: None):
        yield


@contextlib.contextmanager
def superseded_runs_stay() -> Iterator[None]:
    """A fenced run whose partition is not lost is never tried again."""
    with patch.object(JobFlow, "_retry", lambda self, run: None):
        yield


@contextlib.contextmanager
def ends_twice() -> Iterator[None]:
    """The decided record is written again after Redis forgot it, although the end is there."""
    acknowledge = AttemptWriter.acknowledge

    def again(self: AttemptWriter, reply: Any) -> None:
        sent, self._sent_end = self._sent_end, b""
        try:
            acknowledge(self, reply)
        finally:
            self._sent_end = sent

    with patch.object(AttemptWriter, "acknowledge", again):
        yield


CONTROLS: dict[str, Control] = {
    control.__name__: control
    for control in (
        no_fence, ignores_decided_record, no_count_of_events, ignores_cancel_key, commits_the_newest,
        map_lists_incomplete, ignores_lost_partitions, ends_before_the_result, completes_before_the_result,
        requests_stay, superseded_runs_stay, ends_twice,
    )
}  # fmt: skip
