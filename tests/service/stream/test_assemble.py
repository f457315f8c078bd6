"""The assembler against every order of delivery, loss and restart that Hypothesis finds."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.stream.assemble import Fed, StreamAssembler, standing
from service.wire.common import Usage
from service.wire.event import Delta, End, Event, Start

JOB = "job-1"


def start(epoch: int = 1, *resumed: int) -> Start:
    return Start(JOB, epoch, resumed or (0,))


def delta(seq: int, text: str, *token_ids: int, epoch: int = 1, index: int = 0) -> Delta:
    return Delta(JOB, epoch, seq, index, text, token_ids)


def end(seq: int, *texts: str, epoch: int = 1, events: int | None = None) -> End:
    hashes = tuple(hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return End(JOB, epoch, seq, "completed", "stop", Usage(), events or seq + 1, hashes)


def feed(events: Sequence[Event]) -> tuple[StreamAssembler, list[Fed]]:
    assembler = StreamAssembler(JOB)
    return assembler, [assembler.feed(event) for event in events]


def test_a_whole_stream_is_proven_complete() -> None:
    assembler, fed = feed([start(), delta(1, "Grüße ", 1), delta(2, "世界", 2, 3), end(3, "Grüße 世界")])
    assert set(fed) == {Fed.APPLIED}
    assert assembler.problems() == []
    assert assembler.choice(0).token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        (end(2, "a", events=9), "counts 9 events"),
        (end(2, "b"), "text_sha256"),
        (end(2), "text_sha256"),
    ],
)
def test_a_wrong_count_or_hash_is_reported(last: End, problem: str) -> None:
    assembler, _ = feed([start(), delta(1, "a", 1), last])
    assert problem in " ".join(assembler.problems())


def test_without_an_end_event_nothing_is_proven() -> None:
    assembler, _ = feed([start(), delta(1, "a", 1)])
    assert assembler.problems() == ["no end event"]


def test_a_choice_that_wrote_nothing_counts_as_empty_text() -> None:
    assembler, _ = feed([start(1, 0, 0), delta(1, "a", 1), end(2, "a", "")])
    assert assembler.problems() == []


def test_a_hole_changes_nothing_and_is_never_skipped_silently() -> None:
    assembler, fed = feed([start(), delta(1, "a", 1), delta(3, "c", 3), end(4, "abc")])
    assert fed == [Fed.APPLIED, Fed.APPLIED, Fed.GAP, Fed.GAP]
    assert assembler.texts() == ["a"]
    assembler.skip_to(delta(3, "c", 3))
    assert assembler.feed(end(4, "ac")) is Fed.APPLIED
    assert assembler.problems() == ["events are missing"], "not even when the hash happens to agree"


def test_sequence_numbers_reused_across_attempts_are_distinguished_by_epoch() -> None:
    first: list[Event] = [start(), delta(1, "a", 1), delta(2, "b", 2)]
    second: list[Event] = [start(2, 2), delta(1, "c", 3, epoch=2), end(2, "abc", epoch=2)]
    assembler, fed = feed([*first, *second])
    assert set(fed) == {Fed.APPLIED}
    assert assembler.problems() == []


def test_a_new_attempt_cuts_back_to_the_tokens_it_resumes() -> None:
    assembler, fed = feed(
        [start(), delta(1, "a", 1), delta(2, "b", 2, 3), start(2, 1), delta(1, "x", 9, epoch=2)]
    )
    assert set(fed) == {Fed.APPLIED}
    assert (assembler.texts(), assembler.choice(0).token_ids) == (["ax"], [1, 9])


def test_events_of_an_older_attempt_are_ignored_after_the_new_one_started() -> None:
    assembler, fed = feed([start(), delta(1, "a", 1), start(2, 1), delta(2, "old", 2)])
    assert fed[-1] is Fed.DUPLICATE
    assert assembler.texts() == ["a"]


def test_an_attempt_that_resumes_from_tokens_never_seen_is_a_gap() -> None:
    _, fed = feed([start(), delta(1, "a", 1), start(2, 5)])
    assert fed[-1] is Fed.GAP


def test_a_hole_is_healed_by_an_attempt_that_resumes_before_it() -> None:
    assembler, _ = feed([start(), delta(1, "a", 1)])
    assembler.skip_to(delta(5, "lost", 7))
    assert assembler.feed(start(2, 1)) is Fed.APPLIED
    assembler.feed(end(1, "a", epoch=2))
    assert assembler.problems() == []


def test_text_without_tokens_belongs_to_the_tokens_before_it() -> None:
    log: list[Event] = [start(1, 0, 0), delta(1, "a", 1), delta(2, "!"), delta(3, "?", index=1)]
    resumed = standing(JOB, log, 2)
    assert [choice.text for choice in resumed] == ["a!", ""]
    assembler, _ = feed([*log, start(2, 1, 0)])
    assert assembler.texts() == ["a!", ""]


def test_nothing_counts_after_the_end() -> None:
    assembler, fed = feed([start(), end(1, ""), delta(2, "late", 1), start(2, 0)])
    assert fed[2:] == [Fed.DUPLICATE, Fed.DUPLICATE]
    assert assembler.problems() == []


def test_an_event_of_another_job_is_refused() -> None:
    with pytest.raises(ValueError, match="job 'other' in the stream of job 'job-1'"):
        StreamAssembler(JOB).feed(replace(start(), id="other"))


@st.composite
def streams(draw: st.DrawFn, *, cut_back: bool = True) -> tuple[list[Event], list[str], list[list[int]]]:
    """Up to three attempts, each resuming at a delta's edge of what stood; with the final texts and tokens."""
    num_choices = draw(st.integers(1, 3))
    kept: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(num_choices)]
    events: list[Event] = []
    seq = 0
    for epoch in range(1, draw(st.integers(1, 3)) + 1):
        for index in range(num_choices if cut_back else 0):
            kept[index] = kept[index][: draw(st.integers(0, len(kept[index])))]
        resumed = tuple(sum(len(tokens) for _, tokens in pieces) for pieces in kept)
        events.append(Start(JOB, epoch, resumed))
        seq = 1
        for _ in range(draw(st.integers(0, 6))):
            index = draw(st.integers(0, num_choices - 1))
            text = draw(st.text("ab é世🙂", max_size=4))
            tokens = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
            kept[index].append((text, tokens))
            events.append(Delta(JOB, epoch, seq, index, text, tokens))
            seq += 1
    texts = ["".join(text for text, _ in pieces) for pieces in kept]
    events.append(end(seq, *texts, epoch=events[-1].epoch))
    return events, texts, [[token for _, tokens in pieces for token in tokens] for pieces in kept]


@given(streams(), st.data())
def test_duplicates_and_replays_never_change_what_is_assembled(
    stream: tuple[list[Event], list[str], list[list[int]]], data: st.DataObject
) -> None:
    events, texts, tokens = stream
    assembler = StreamAssembler(JOB)
    for i, event in enumerate(events):
        replay_from = data.draw(st.integers(0, i))
        for seen in events[replay_from:i]:
            assert assembler.feed(seen) is Fed.DUPLICATE
        assert assembler.feed(event) is Fed.APPLIED
    assert assembler.problems() == []
    assert [assembler.choice(index).text for index in range(len(texts))] == texts
    assert [assembler.choice(index).token_ids for index in range(len(texts))] == tokens


@given(streams(), st.data())
def test_any_lost_event_is_a_gap_unless_a_later_attempt_makes_it_good(
    stream: tuple[list[Event], list[str], list[list[int]]], data: st.DataObject
) -> None:
    events, texts, _ = stream
    lost = data.draw(st.integers(0, len(events) - 2))
    assembler = StreamAssembler(JOB)
    gaps = 0
    for event in events[:lost] + events[lost + 1 :]:
        if assembler.feed(event) is Fed.GAP:
            gaps += 1
            assembler.skip_to(event)
    if not assembler.problems():
        assert [assembler.choice(index).text for index in range(len(texts))] == texts
    if events[lost].epoch == events[-1].epoch:
        assert gaps
        assert assembler.problems()


@given(streams(cut_back=False), st.data())
def test_a_log_with_gaps_resumes_from_a_prefix_that_readers_can_cut_back_to(
    stream: tuple[list[Event], list[str], list[list[int]]], data: st.DataObject
) -> None:
    """Torn as Redis tears: trimmed in front, or the last writes lost in a failover; the reader saw them all."""
    events, texts, _ = stream
    written = events[: data.draw(st.integers(0, len(events) - 1))]
    kept = data.draw(st.integers(0, len(written)))
    trimmed = data.draw(st.integers(0, kept))
    resumed = standing(JOB, written[trimmed:kept], len(texts))
    reader, _ = feed(written)
    successor = Start(JOB, 9, tuple(len(choice.token_ids) for choice in resumed))
    assert reader.feed(successor) is Fed.APPLIED
    for index, choice in enumerate(resumed):
        assert texts[index].startswith(choice.text)
        assert reader.choice(index).text == choice.text
        assert tuple(reader.choice(index).token_ids) == choice.token_ids


def test_a_log_whose_beginning_was_trimmed_gives_nothing_to_resume() -> None:
    log = [delta(7, "g", 7), delta(8, "h", 8)]
    assert standing(JOB, log, 1)[0].token_ids == ()
