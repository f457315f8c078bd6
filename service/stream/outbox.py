"""What one attempt at a job still has to write to its stream: numbered once sent, merged until then."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.stream.config import StreamConfig
from service.stream.keys import JobKeys
from service.stream.resp import pack_args
from service.stream.resume import ResumedChoice
from service.stream.scripts import AppendReply, Script
from service.wire.common import ErrorInfo, FinishReason, Status, TokenLogprob, Usage
from service.wire.event import Delta, End, Start, encode_delta, encode_end, encode_start

_TOKEN_BYTES = 8
"""Rough size of a token id in JSON, for the backlog's estimate."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt writes; what the fence compares."""

    job_id: str
    epoch: int
    writer: str
    """A nonce: tells apart two attempts that got one epoch from a Redis that lost its memory between them."""
    origin: str
    digest: str
    streamed: bool
    worker: str = ""


@dataclass(slots=True)
class _Merged:
    texts: list[str]
    token_ids: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended, as its end event says it."""

    status: Status
    finish_reason: FinishReason | None
    usage: Usage
    error: ErrorInfo | None = None


class Outbox:
    """Events in the order start, deltas, end.

    What was sent keeps its seq and bytes until acknowledged, so that it can be sent again; what was not is
    merged per choice. Both are bounded by the job's max_tokens.
    """

    def __init__(
        self, attempt: Attempt, resumed: Sequence[ResumedChoice], config: StreamConfig, script: Script
    ) -> None:
        self.attempt = attempt
        self.closed = False
        """Nothing more will be written."""
        self.fenced = False
        """Closed because a later attempt has taken over."""
        self._last_word = True
        """What is answered to those who wait once nothing more will be written."""
        self._error: Exception | None = None
        self.backlog_bytes = 0
        self._resumed_tokens = tuple(len(choice.token_ids) for choice in resumed)
        self._hashes = [hashlib.sha256(choice.text.encode()) for choice in resumed]
        self._start: Start | None = None
        self._started = False
        self._pending: dict[int, _Merged] = {}
        self._ending: Ending | None = None
        self._sent: list[bytes] = []
        self._sent_end = b""
        self._acknowledged_seq = 0
        self._next_seq = 0
        self._num_enqueued = 0
        self._num_sent = 0
        self._num_acknowledged = 0
        self._waiters: list[tuple[int, asyncio.Future[bool]]] = []
        self._prefix = _prefix(attempt, config, script)

    @property
    def dirty(self) -> bool:
        """Whether something waits to be written for the first time or again."""
        return not self.closed and self._num_acknowledged < self._num_enqueued

    def discard_resumed(self) -> None:
        """Begin at the first token after all: what earlier attempts streamed cannot be continued. Before start()."""
        assert not self._started, f"job {self.attempt.job_id} has already announced what it continues"
        self._resumed_tokens = tuple(0 for _ in self._resumed_tokens)
        self._hashes = [hashlib.sha256() for _ in self._hashes]

    def start(self, attempt: int = 0) -> None:
        if self.closed or self._started or not self.attempt.streamed:
            return
        self._started = True
        self._start = Start(
            self.attempt.job_id,
            self.attempt.epoch,
            self._resumed_tokens,
            attempt=attempt,
            worker=self.attempt.worker,
        )
        self._num_enqueued += 1

    def delta(
        self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        if self.closed or not self.attempt.streamed:
            return
        assert self._ending is None, f"a delta of job {self.attempt.job_id} after its end"
        self.start()
        self._hashes[index].update(text.encode())
        self._num_enqueued += 1
        self.backlog_bytes += len(text) + _TOKEN_BYTES * len(token_ids)
        merged = self._pending.get(index)
        if merged is None:
            self._pending[index] = merged = _Merged([text], list(token_ids))
        else:
            merged.texts.append(text)
            merged.token_ids.extend(token_ids)
        if logprobs:
            merged.logprobs.extend(logprobs)

    def end(self, ending: Ending) -> None:
        self.start()
        self._ending = ending
        self._num_enqueued += 1

    def when_acknowledged(self) -> "asyncio.Future[bool]":
        """Resolves when all that is enqueued now is in Redis (True), or never will be (False)."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._error is not None:
            future.set_exception(self._error)
        elif not self.dirty:
            future.set_result(self._last_word)
        else:
            self._waiters.append((self._num_enqueued, future))
        return future

    def command(self) -> bytes:
        """The script call that writes what is due: what was sent and not acknowledged, else what is new."""
        if self._num_sent == self._num_acknowledged:
            self._encode_pending()
        arguments = [self._sent_end, b"%d" % self._acknowledged_seq, *self._sent]
        return b"*%d\r\n%b%b" % (_NUM_PREFIX + len(arguments), self._prefix, pack_args(arguments))

    def acknowledge(self, reply: AppendReply) -> None:
        """Take the script's reply to the last `command()`."""
        if reply is AppendReply.FENCED:
            self.fence()
            return
        self.backlog_bytes -= sum(map(len, self._sent))
        self._sent = []
        self._acknowledged_seq = self._next_seq
        self._num_acknowledged = self._num_sent
        if self._waiters:
            self._resolve(self._num_acknowledged)
        if self._ending is not None and self._num_acknowledged == self._num_enqueued:
            self.closed = True

    def close(self, last_word: bool) -> None:
        """Write nothing more. Everybody who waits is told `last_word`."""
        self.closed = True
        self._last_word = last_word
        self._pending.clear()
        self._sent = []
        self.backlog_bytes = 0
        self._resolve(self._num_enqueued)

    def fence(self) -> None:
        """A later attempt has taken over."""
        self.fenced = True
        self.close(False)

    def fail(self, error: Exception) -> None:
        """Nothing more can be written here; raised in everybody who waits."""
        self.closed = True
        self._error = error
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(error)
        self._waiters = []

    def _resolve(self, up_to: int) -> None:
        for target, future in self._waiters:
            if target <= up_to and not future.done():
                future.set_result(self._last_word)
        self._waiters = [waiter for waiter in self._waiters if waiter[0] > up_to]

    def _encode_pending(self) -> None:
        job_id, epoch = self.attempt.job_id, self.attempt.epoch
        seq = self._next_seq
        if self._start is not None:
            self._sent.append(encode_start(self._start))
            self._start = None
            seq += 1
        for index, merged in self._pending.items():
            text = merged.texts[0] if len(merged.texts) == 1 else "".join(merged.texts)
            logprobs = tuple(merged.logprobs) if merged.logprobs else None
            delta = Delta(job_id, epoch, seq, index, text, tuple(merged.token_ids), logprobs)
            self._sent.append(encode_delta(delta))
            seq += 1
        self._pending = {}
        if self._ending is not None:
            self._encode_end(self._ending, seq)
            seq += self.attempt.streamed
        self._next_seq = seq
        self._num_sent = self._num_enqueued
        self.backlog_bytes = sum(map(len, self._sent))

    def _encode_end(self, ending: Ending, seq: int) -> None:
        self._sent_end = ending.status.encode()
        if self.attempt.streamed:
            end = End(
                id=self.attempt.job_id,
                epoch=self.attempt.epoch,
                seq=seq,
                status=ending.status,
                finish_reason=ending.finish_reason,
                usage=ending.usage,
                events=seq + 1,
                text_sha256=tuple(choice.hexdigest() for choice in self._hashes),
                error=ending.error,
            )
            self._sent.append(encode_end(end))


_NUM_PREFIX = 12
"""EVALSHA, its hash, the number of keys, two keys and the seven arguments that stay the same."""


def _prefix(attempt: Attempt, config: StreamConfig, script: Script) -> bytes:
    keys = JobKeys.of(attempt.job_id)
    constant = (
        "EVALSHA", script.sha, 2, keys.meta, keys.log,
        attempt.epoch, attempt.writer, config.ttl_s * 1000, config.max_log_entries, keys.live,
        attempt.origin, attempt.digest,
    )  # fmt: skip
    return pack_args([arg if isinstance(arg, bytes) else str(arg).encode() for arg in constant])
