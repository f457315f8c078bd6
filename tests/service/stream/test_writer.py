"""What one attempt sends: numbered once, merged until sent, the same bytes when sent again."""

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.stream.assemble import Fed, ResumedChoice, StreamAssembler
from service.stream.keys import APPEND, AppendReply, Attempt
from service.stream.writer import AttemptWriter
from service.wire.common import TokenLogprob
from service.wire.event import Delta, End, Event, Start, parse_event
from tests.support.configs import stream_config
from tests.support.streams import COMPLETED, DIGEST, REFUSED

JOB = "job-1"
RESUMED = (ResumedChoice((1, 2), "so far "), ResumedChoice())


class Writer(AttemptWriter):
    """Counts the calls to the write loop and the publisher."""

    def __init__(
        self, *, streamed: bool = True, resumed: tuple[ResumedChoice, ...] = (ResumedChoice(),)
    ) -> None:
        self.num_marks = 0
        self.num_closed = 0
        attempt = Attempt(JOB, 1, "w", "jobs/0/1", DIGEST, streamed, 3, "deployment", "worker-1")
        super().__init__(
            attempt, resumed, stream_config(), APPEND, mark=self._count_mark, on_closed=self._count_closed
        )

    def _count_mark(self, writer: AttemptWriter) -> None:
        assert writer is self
        self.num_marks += 1

    def _count_closed(self, writer: AttemptWriter) -> None:
        assert writer is self
        self.num_closed += 1


@dataclass(frozen=True)
class Sent:
    """What a packed script call carries besides what is the same in every one."""

    first_seq: int
    events: list[Event]
    decided: bytes = b""
    ended: str = ""
    refused: bool = False


def sent(command: bytes) -> Sent:
    words = _words(command)
    assert words[0] == b"EVALSHA"
    assert words[5:7] + words[10:14] == [b"1", b"w", b"jobs/0/1", DIGEST.encode(), b"deployment", b"3"]
    decided, ended, fate, first, *events = words[14:]
    assert fate in (b"", b"accepted", b"refused")
    return Sent(
        int(first), [parse_event(word) for word in events], decided, ended.decode(), fate == b"refused"
    )


def _words(command: bytes) -> list[bytes]:
    head, rest = command.split(b"\r\n", 1)
    words = []
    for _ in range(int(head[1:])):
        length, rest = rest.split(b"\r\n", 1)
        size = int(length[1:])
        words.append(rest[:size])
        assert rest[size : size + 2] == b"\r\n"
        rest = rest[size + 2 :]
    assert rest == b""
    return words


async def begun(waiting: Coroutine[None, None, bool]) -> "asyncio.Task[bool]":
    """What `flushed`, `decide` or `end` enqueues is enqueued, and its answer is still to come."""
    task = asyncio.create_task(waiting)
    await asyncio.sleep(0)
    return task


async def test_deltas_merge_per_choice_until_they_are_sent() -> None:
    writer = Writer(resumed=RESUMED)
    writer.start()
    writer.delta(0, "a", (3,))
    writer.delta(1, "x", (7,))
    writer.delta(0, "b", (4, 5))
    assert sent(writer.command()) == Sent(
        0,
        [
            Start(JOB, 1, (2, 0), attempt=3, worker="worker-1"),
            Delta(JOB, 1, 1, 0, "ab", (3, 4, 5)),
            Delta(JOB, 1, 2, 1, "x", (7,)),
        ],
    )


async def test_logprobs_merge_with_their_tokens() -> None:
    one, two = TokenLogprob("a", 3, -0.5), TokenLogprob("b", 4, -1.5)
    writer = Writer()
    writer.delta(0, "a", (3,), (one,))
    writer.delta(0, "b", (4,), (two,))
    event = sent(writer.command()).events[1]
    assert isinstance(event, Delta)
    assert event.logprobs == (one, two)


async def test_sent_events_are_sent_again_unchanged_and_later_deltas_wait_and_merge() -> None:
    writer = Writer()
    writer.start()
    writer.delta(0, "a", (1,))
    deciding = await begun(writer.decide(b"record"))
    first = writer.command()
    writer.delta(0, "b", (2,))
    writer.delta(0, "c", (3,))
    assert writer.command() == first
    assert sent(first).decided == b"record"
    writer.acknowledge(AppendReply.WRITTEN)
    assert await deciding
    assert sent(writer.command()) == Sent(2, [Delta(JOB, 1, 2, 0, "bc", (2, 3))])
    writer.acknowledge(AppendReply.WRITTEN)
    assert not writer.dirty
    assert writer.backlog_bytes == 0


async def test_the_end_event_counts_its_epoch_and_hashes_the_text_of_all_epochs() -> None:
    writer = Writer(resumed=RESUMED)
    writer.start()
    writer.delta(0, "é", (3,))
    ending = await begun(writer.end(COMPLETED))
    told = sent(writer.command())
    assert (told.ended, told.refused) == ("completed", False)
    last = told.events[-1]
    assert isinstance(last, End)
    assert (last.seq, last.events) == (2, 3)
    assert last.text_sha256 == tuple(hashlib.sha256(t.encode()).hexdigest() for t in ("so far é", ""))
    writer.acknowledge(AppendReply.WRITTEN)
    assert (writer.closed, writer.ended, writer.fenced) == (True, True, False)
    assert await ending


async def test_only_a_refusal_is_marked_as_one() -> None:
    writer = Writer()
    ending = await begun(writer.end(REFUSED))
    told = sent(writer.command())
    assert (told.ended, told.refused) == ("rejected", True)
    writer.acknowledge(AppendReply.WRITTEN)
    assert await ending


@pytest.mark.parametrize("text", [None, "a"])
async def test_without_a_start_asked_for_a_stream_still_begins_with_one(text: str | None) -> None:
    writer = Writer()
    if text is not None:
        writer.delta(0, text, (1,))
    ending = await begun(writer.end(COMPLETED))
    kinds = [event.kind for event in sent(writer.command()).events]
    assert (kinds[0], kinds[-1], len(kinds)) == ("start", "end", 2 if text is None else 3)
    writer.abandon()
    assert not await ending


async def test_a_delta_after_the_end_is_our_bug() -> None:
    writer = Writer()
    ending = await begun(writer.end(COMPLETED))
    with pytest.raises(AssertionError, match="after its end"):
        writer.delta(0, "a", (1,))
    writer.abandon()
    assert not await ending


async def test_a_job_without_a_stream_writes_only_its_decision_and_its_end() -> None:
    writer = Writer(streamed=False)
    writer.start()
    writer.delta(0, "a", (1,))
    assert not writer.dirty
    deciding = await begun(writer.decide(b"record"))
    assert sent(writer.command()) == Sent(0, [], decided=b"record")
    writer.acknowledge(AppendReply.WRITTEN)
    ending = await begun(writer.end(COMPLETED))
    assert sent(writer.command()) == Sent(0, [], ended="completed")
    writer.acknowledge(AppendReply.WRITTEN)
    assert await deciding
    assert await ending


async def test_waiting_covers_earlier_events_and_not_later_ones() -> None:
    writer = Writer()
    writer.delta(0, "a", (1,))
    before = await begun(writer.flushed())
    writer.command()
    writer.delta(0, "b", (2,))
    after = await begun(writer.flushed())
    writer.acknowledge(AppendReply.WRITTEN)
    assert await before
    assert not after.done()
    writer.command()
    writer.acknowledge(AppendReply.FENCED)
    assert (await after, writer.fenced, writer.ended) == (False, True, False)


async def test_an_abandoned_writer_takes_nothing_and_answers_false() -> None:
    writer = Writer()
    writer.delta(0, "a", (1,))
    writer.abandon()
    writer.abandon()
    marks = writer.num_marks
    writer.keep_alive()
    answers = [writer.start(), writer.delta(0, "b", (2,))]
    answers += [await writer.flushed(), await writer.decide(b"record"), await writer.end(COMPLETED)]
    assert answers == [False] * 5
    assert (writer.dirty, writer.num_marks, writer.num_closed) == (False, marks, 1)
    assert (writer.ended, writer.fenced, writer.backlog_bytes) == (False, False, 0)


async def test_staying_alive_writes_once_more_and_no_event() -> None:
    writer = Writer()
    writer.start()
    writer.command()
    writer.acknowledge(AppendReply.WRITTEN)
    assert not writer.dirty
    writer.keep_alive()
    assert (writer.dirty, sent(writer.command())) == (True, Sent(1, []))


async def test_hazard_staying_alive_while_the_end_is_in_flight_would_end_the_stream_twice() -> None:
    writer = Writer()
    ending = await begun(writer.end(COMPLETED))
    events = sent(writer.command()).events
    writer.keep_alive()
    writer.acknowledge(AppendReply.WRITTEN)
    while writer.dirty:
        events += sent(writer.command()).events
        writer.acknowledge(AppendReply.WRITTEN)
    assert await ending
    assert [event.kind for event in events] == ["start", "end"]
    assert writer.ended


async def test_hazard_a_redis_that_forgot_the_job_before_its_end_would_get_two_ends() -> None:
    writer = Writer()
    deciding = await begun(writer.decide(b"record"))
    writer.command()
    writer.acknowledge(AppendReply.WRITTEN)
    assert await deciding
    ending = await begun(writer.end(COMPLETED))
    writer.command()
    writer.acknowledge(AppendReply.WRITTEN_AFTER_LOSS)
    assert await ending
    assert (writer.closed, writer.ended, writer.dirty) == (True, True, False)


async def test_a_write_that_can_never_succeed_raises_in_current_and_later_waiters() -> None:
    writer = Writer()
    writer.delta(0, "a", (1,))
    waiting = await begun(writer.flushed())
    writer.fail(RuntimeError("gone"))
    for answer in (waiting, writer.flushed(), writer.decide(b"record"), writer.end(COMPLETED)):
        with pytest.raises(RuntimeError, match="gone"):
            await answer


@given(
    st.lists(st.tuples(st.integers(0, 1), st.text("ab é", max_size=3), st.sampled_from(["", "send", "lose"])))
)
async def test_however_sending_and_merging_interleave_the_stream_is_whole(
    steps: list[tuple[int, str, str]],
) -> None:
    """The receiver keeps what is new by seq, as the append script does; "lose" loses the acknowledgement."""
    writer = Writer(resumed=(ResumedChoice(), ResumedChoice()))
    received: list[Event] = []

    def flush(acknowledged: bool) -> None:
        told = sent(writer.command())
        received.extend(told.events[max(0, len(received) - told.first_seq) :])
        if acknowledged:
            writer.acknowledge(AppendReply.WRITTEN)

    writer.start()
    texts = ["", ""]
    for index, text, action in steps:
        texts[index] += text
        writer.delta(index, text, (1,))
        if action:
            flush(action == "send")
    ending = await begun(writer.end(COMPLETED))
    while writer.dirty:
        flush(True)
    assert await ending
    assembler = StreamAssembler(JOB)
    assert all(assembler.feed(event) is Fed.APPLIED for event in received)
    assert assembler.problems() == []
    assert [assembler.choice(index).text for index in (0, 1)] == texts
