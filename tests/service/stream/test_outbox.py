"""What one attempt sends: numbered once, merged until sent, the same bytes when sent again."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.stream.assemble import Fed, StreamAssembler
from service.stream.config import StreamConfig
from service.stream.outbox import Attempt, Outbox
from service.stream.resume import ResumedChoice
from service.stream.scripts import APPEND, AppendReply
from service.wire.common import TokenLogprob
from service.wire.event import Delta, End, Event, Start, parse_event
from tests.support.streams import COMPLETED, DIGEST

JOB = "job-1"
RESUMED = (ResumedChoice((1, 2), "so far "), ResumedChoice())


def outbox(*, streamed: bool = True, resumed: tuple[ResumedChoice, ...] = (ResumedChoice(),)) -> Outbox:
    return Outbox(Attempt(JOB, 1, "w", "jobs/0/1", DIGEST, streamed), resumed, StreamConfig(), APPEND)


def sent(command: bytes) -> tuple[str, int, list[Event]]:
    """(ended, first seq, events) of a packed script call."""
    words = _words(command)
    assert words[0] == b"EVALSHA"
    return words[12].decode(), int(words[13]), [parse_event(word) for word in words[14:]]


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


def test_deltas_merge_per_choice_until_they_are_sent() -> None:
    box = outbox(resumed=RESUMED)
    box.start()
    box.delta(0, "a", (3,), None)
    box.delta(1, "x", (7,), None)
    box.delta(0, "b", (4, 5), None)
    ended, first, events = sent(box.command())
    assert (ended, first) == ("", 0)
    assert events == [
        Start(JOB, 1, (2, 0)),
        Delta(JOB, 1, 1, 0, "ab", (3, 4, 5)),
        Delta(JOB, 1, 2, 1, "x", (7,)),
    ]


def test_logprobs_merge_with_their_tokens() -> None:
    one, two = TokenLogprob("a", 3, -0.5), TokenLogprob("b", 4, -1.5)
    box = outbox()
    box.delta(0, "a", (3,), (one,))
    box.delta(0, "b", (4,), (two,))
    event = sent(box.command())[2][1]
    assert isinstance(event, Delta)
    assert event.logprobs == (one, two)


def test_what_was_sent_is_sent_again_unchanged_and_what_came_since_waits_and_merges() -> None:
    box = outbox()
    box.start()
    box.delta(0, "a", (1,), None)
    first = box.command()
    box.delta(0, "b", (2,), None)
    box.delta(0, "c", (3,), None)
    assert box.command() == first
    box.acknowledge(AppendReply.WRITTEN)
    assert sent(box.command()) == ("", 2, [Delta(JOB, 1, 2, 0, "bc", (2, 3))])
    box.acknowledge(AppendReply.WRITTEN)
    assert not box.dirty
    assert box.backlog_bytes == 0


def test_the_end_event_counts_its_epoch_and_hashes_the_text_of_all_epochs() -> None:
    box = outbox(resumed=RESUMED)
    box.start()
    box.delta(0, "é", (3,), None)
    box.end(COMPLETED)
    ended, _, events = sent(box.command())
    assert ended == "completed"
    last = events[-1]
    assert isinstance(last, End)
    assert (last.seq, last.events) == (2, 3)
    assert last.text_sha256 == tuple(hashlib.sha256(t.encode()).hexdigest() for t in ("so far é", ""))
    box.acknowledge(AppendReply.WRITTEN)
    assert box.closed


@pytest.mark.parametrize("text", [None, "a"])
def test_without_a_start_asked_for_a_stream_still_begins_with_one(text: str | None) -> None:
    box = outbox()
    if text is not None:
        box.delta(0, text, (1,), None)
    box.end(COMPLETED)
    kinds = [event.kind for event in sent(box.command())[2]]
    assert (kinds[0], kinds[-1], len(kinds)) == ("start", "end", 2 if text is None else 3)


def test_a_delta_after_the_end_is_our_bug() -> None:
    box = outbox()
    box.end(COMPLETED)
    with pytest.raises(AssertionError, match="after its end"):
        box.delta(0, "a", (1,), None)


def test_a_job_without_a_stream_writes_only_that_it_has_ended() -> None:
    box = outbox(streamed=False)
    box.start()
    box.delta(0, "a", (1,), None)
    assert not box.dirty
    box.end(COMPLETED)
    assert sent(box.command()) == ("completed", 0, [])


async def test_waiting_ends_with_what_was_enqueued_before_and_not_with_what_came_after() -> None:
    box = outbox()
    box.delta(0, "a", (1,), None)
    before = box.when_acknowledged()
    box.command()
    box.delta(0, "b", (2,), None)
    after = box.when_acknowledged()
    box.acknowledge(AppendReply.WRITTEN)
    assert before.done()
    assert not after.done()
    box.command()
    box.acknowledge(AppendReply.FENCED)
    assert (await before, await after, box.fenced) == (True, False, True)


async def test_what_can_never_be_written_is_raised_in_those_who_wait_and_who_come_later() -> None:
    box = outbox()
    box.delta(0, "a", (1,), None)
    waiting = box.when_acknowledged()
    box.fail(RuntimeError("gone"))
    for future in (waiting, box.when_acknowledged()):
        with pytest.raises(RuntimeError, match="gone"):
            await future


@given(
    st.lists(st.tuples(st.integers(0, 1), st.text("ab é", max_size=3), st.sampled_from(["", "send", "lose"])))
)
def test_however_sending_and_merging_interleave_the_stream_is_whole(
    steps: list[tuple[int, str, str]],
) -> None:
    """The receiver keeps what is new by seq, as the append script does; "lose" loses the acknowledgement."""
    box = outbox(resumed=(ResumedChoice(), ResumedChoice()))
    received: list[Event] = []

    def flush(acknowledged: bool) -> None:
        _, first, events = sent(box.command())
        received.extend(events[max(0, len(received) - first) :])
        if acknowledged:
            box.acknowledge(AppendReply.WRITTEN)

    box.start()
    texts = ["", ""]
    for index, text, action in steps:
        texts[index] += text
        box.delta(index, text, (1,), None)
        if action:
            flush(action == "send")
    box.end(COMPLETED)
    while box.dirty:
        flush(True)
    assembler = StreamAssembler(JOB)
    assert all(assembler.feed(event) is Fed.APPLIED for event in received)
    assert assembler.problems() == []
    assert [assembler.choice(index).text for index in (0, 1)] == texts
