"""Writes the stream of one attempt at a job: events are numbered when first sent, and merged until then."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.stream.assemble import ResumedChoice
from service.stream.connection import pack_args
from service.stream.keys import NUM_PREFIX, AppendReply, Attempt, Script, append_prefix
from service.stream.stream_config import StreamConfig
from service.wire.common import TokenLogprob
from service.wire.event import Delta, End, Ending, Start, encode_delta, encode_end, encode_start

_TOKEN_BYTES = 8
"""Rough size of a token id in JSON, for the backlog's estimate."""


@dataclass(slots=True)
class _Merged:
    texts: list[str]
    token_ids: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)


class AttemptWriter:
    """Events in the order start, deltas, end. Event loop only; the write loop carries what is due to Redis.

    What was sent keeps its seq and bytes until acknowledged, so that it can be sent again; what was not is
    merged per choice. Both are bounded by the job's max_tokens. Once a newer attempt has the stream, or this one was
    given up, nothing more is written and every method answers False.
    """

    def __init__(
        self,
        attempt: Attempt,
        resumed: Sequence[ResumedChoice],
        config: StreamConfig,
        script: Script,
        *,
        mark: Callable[["AttemptWriter"], None],
        on_closed: Callable[["AttemptWriter"], None],
    ) -> None:
        """`mark` tells the write loop that a command is due; `on_closed` is called at the end, however it comes."""
        self.attempt = attempt
        self.closed = False
        """Nothing more will be written."""
        self.fenced = False
        """Closed because a later attempt has taken over."""
        self.ended = False
        """Closed because the end event is in Redis."""
        self._mark = mark
        self._on_closed = on_closed
        self._final_answer = True
        """The answer to waiters once no more is written."""
        self._error: Exception | None = None
        self.backlog_bytes = 0
        self._resumed_tokens = tuple(len(choice.token_ids) for choice in resumed)
        self._hashes = [hashlib.sha256(choice.text.encode()) for choice in resumed]
        self._start: Start | None = None
        self._started = self._accepted = False
        self._unsent: dict[int, _Merged] = {}
        self._record = b""
        """The decided result, until the end is in Redis."""
        self._decided = b""
        """The same while it is to be written."""
        self._ending: Ending | None = None
        self._sent: list[bytes] = []
        self._sent_decided = self._sent_end = b""
        self._acknowledged_seq = 0
        self._next_seq = 0
        self._num_enqueued = 0
        self._num_sent = 0
        self._num_acknowledged = 0
        self._waiters: list[tuple[int, asyncio.Future[bool]]] = []
        self._prefix = append_prefix(attempt, config, script)

    @property
    def epoch(self) -> int:
        return self.attempt.epoch

    @property
    def dirty(self) -> bool:
        """Whether something waits to be written for the first time or again."""
        return not self.closed and self._num_acknowledged < self._num_enqueued

    def restart(self) -> None:
        """Begin at the first token after all: what earlier attempts streamed cannot be continued. Before start()."""
        assert not self._started, f"job {self.attempt.job_id} has already announced what it continues"
        self._resumed_tokens = tuple(0 for _ in self._resumed_tokens)
        self._hashes = [hashlib.sha256() for _ in self._hashes]

    def start(self) -> bool:
        """Enqueue the start event, before the first delta."""
        if self.closed:
            return False
        if self.attempt.streamed and not self._started:
            self._started = True
            self._start = Start(
                self.attempt.job_id,
                self.attempt.epoch,
                self._resumed_tokens,
                attempt=self.attempt.number,
                worker=self.attempt.worker,
            )
            self._enqueue()
        return True

    def delta(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> bool:
        """Enqueue tokens of one choice and the text they released."""
        if self.closed:
            return False
        if not self.attempt.streamed:
            return True
        assert self._ending is None, f"a delta of job {self.attempt.job_id} after its end"
        self.start()
        self._hashes[index].update(text.encode())
        self.backlog_bytes += len(text) + _TOKEN_BYTES * len(token_ids)
        merged = self._unsent.get(index)
        if merged is None:
            self._unsent[index] = merged = _Merged([text], list(token_ids))
        else:
            merged.texts.append(text)
            merged.token_ids.extend(token_ids)
        if logprobs:
            merged.logprobs.extend(logprobs)
        self._enqueue()
        return True

    def accept(self) -> None:
        """Tell other records with this id that the job will run, and so keeps the id."""
        if not self.closed:
            self._accepted = True
            self._enqueue()

    async def flushed(self) -> bool:
        """Wait until all that was enqueued so far is in the log. Raises DependencyError when the publisher stops
        before that."""
        return await self._when_acknowledged()

    async def decide(self, record: bytes) -> bool:
        """Decide the job's result before it becomes visible.

        When it returns, all deltas are in the log and the record stands beside it: an attempt that takes the job over
        sends these bytes and no others. May be called again as long as Kafka never accepted the record.
        Raises DependencyError as `flushed` does.
        """
        if not self.closed:
            self.start()
            self._record = self._decided = record
            self.backlog_bytes += len(record)
            self._enqueue()
        return await self._when_acknowledged()

    async def end(self, ending: Ending) -> bool:
        """Write the end event and mark the job as ended, in one step.

        Only after the result is durable: from then on a redelivery of the record is suppressed. Raises DependencyError
        as `flushed` does.
        """
        if not self.closed:
            self.start()
            self._ending = ending
            self._enqueue()
        return await self._when_acknowledged()

    def keep_alive(self) -> None:
        """Write at least once more, even without events: this renews the keys, and restores them if Redis forgot
        them."""
        if not self.closed and self._ending is None:
            self._enqueue()

    def abandon(self) -> None:
        """Write nothing more; the next attempt continues from what is in the log."""
        if not self.closed:
            self.close(False)
            self._on_closed(self)

    def _enqueue(self) -> None:
        self._num_enqueued += 1
        self._mark(self)

    def _when_acknowledged(self) -> "asyncio.Future[bool]":
        """Resolves when all that is enqueued now is in Redis (True), or never will be (False)."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._error is not None:
            future.set_exception(self._error)
        elif not self.dirty:
            future.set_result(self._final_answer)
        else:
            self._waiters.append((self._num_enqueued, future))
        return future

    def command(self) -> bytes:
        """The script call that writes what is due: what was sent and not acknowledged, else what is new."""
        if self._num_sent == self._num_acknowledged:
            self._encode_unsent()
        fate = b"accepted" if self._accepted else b""
        if self._ending is not None:
            fate = b"refused" if self._ending.refused else b""
        arguments = [self._sent_decided, self._sent_end, fate, b"%d" % self._acknowledged_seq, *self._sent]
        return b"*%d\r\n%b%b" % (NUM_PREFIX + len(arguments), self._prefix, pack_args(arguments))

    def acknowledge(self, reply: AppendReply) -> None:
        """Take the script's reply to the last `command()`."""
        if reply is AppendReply.FENCED:
            self.fence()
            return
        # With the end in Redis the record is of no more use, and one more command would write a second end.
        lost = reply is AppendReply.WRITTEN_AFTER_LOSS and not self._sent_end
        if lost and self._record and not self._sent_decided:
            self._decided = self._record
            self._num_enqueued += 1
        self.backlog_bytes -= sum(map(len, self._sent)) + len(self._sent_decided)
        self._sent, self._sent_decided = [], b""
        self._acknowledged_seq = self._next_seq
        self._num_acknowledged = self._num_sent
        if self._waiters:
            self._resolve(self._num_acknowledged)
        if self._ending is not None and self._num_acknowledged == self._num_enqueued:
            self.closed = self.ended = True

    def close(self, final_answer: bool) -> None:
        """Write nothing more; answer all waiters with `final_answer`."""
        self.closed = True
        self._final_answer = final_answer
        self._unsent.clear()
        self._sent, self._sent_decided, self._decided, self._record = [], b"", b"", b""
        self.backlog_bytes = 0
        self._resolve(self._num_enqueued)

    def fence(self) -> None:
        """A later attempt has taken over."""
        self.fenced = True
        self.close(False)

    def fail(self, error: Exception) -> None:
        """Write nothing more; raise the error in all waiters."""
        self.closed = True
        self._error = error
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(error)
        self._waiters = []

    def _resolve(self, up_to: int) -> None:
        for target, future in self._waiters:
            if target <= up_to and not future.done():
                future.set_result(self._final_answer)
        self._waiters = [waiter for waiter in self._waiters if waiter[0] > up_to]

    def _encode_unsent(self) -> None:
        job_id, epoch = self.attempt.job_id, self.attempt.epoch
        seq = self._next_seq
        if self._start is not None:
            self._sent.append(encode_start(self._start))
            self._start = None
            seq += 1
        for index, merged in self._unsent.items():
            text = merged.texts[0] if len(merged.texts) == 1 else "".join(merged.texts)
            logprobs = tuple(merged.logprobs) if merged.logprobs else None
            delta = Delta(job_id, epoch, seq, index, text, tuple(merged.token_ids), logprobs)
            self._sent.append(encode_delta(delta))
            seq += 1
        self._unsent = {}
        self._sent_decided, self._decided = self._decided, b""
        if self._ending is not None:
            self._encode_end(self._ending, seq)
            seq += self.attempt.streamed
        self._next_seq = seq
        self._num_sent = self._num_enqueued
        self.backlog_bytes = sum(map(len, self._sent)) + len(self._sent_decided)

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
