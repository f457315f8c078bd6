"""A state machine: the commit never passes the first incomplete offset, and the map is correct."""

from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from service.ingest.offsets import (
    MAX_METADATA_BYTES,
    PartitionOffsets,
    Ranges,
    decode_completed,
    encode_completed,
)

STEPS = settings(max_examples=120, stateful_step_count=60, deadline=None)


class OffsetsMachine(RuleBasedStateMachine):
    """A log with gaps and one owner at a time, which may crash; the broker holds the last commit."""

    tracker: type[PartitionOffsets] = PartitionOffsets

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.end = 0
        self.durable: set[int] = set()
        """Offsets whose outcome is durable; only these may ever be skipped."""
        self.commit: tuple[int, str] = (0, "")
        self.offsets = self.tracker(0)
        self.position = 0
        self.in_flight: set[int] = set()

    @rule(gap=st.sampled_from([0, 0, 0, 1, 2, 300]))
    def append(self, gap: int) -> None:
        self.log.append(self.end + gap)
        self.end += gap + 1

    @rule(gap=st.integers(1, 3))
    def append_marker_only(self, gap: int) -> None:
        self.end += gap

    @precondition(lambda self: any(offset >= self.position for offset in self.log))
    @rule()
    def fetch(self) -> None:
        offset = next(offset for offset in self.log if offset >= self.position)
        self.position = offset + 1
        assert offset >= self.offsets.position, (
            "a record that comes for the first time looks like a rewound log"
        )
        if self.offsets.register(offset):
            assert offset not in self.in_flight
            self.in_flight.add(offset)
        else:
            assert offset in self.durable, f"{offset} was skipped although it is not complete"

    @precondition(lambda self: not any(offset >= self.position for offset in self.log))
    @rule()
    def fetch_trailing_markers(self) -> None:
        self.position = self.end
        self.offsets.advance(self.end)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.in_flight.remove(offset)
        self.durable.add(offset)
        assert self.offsets.complete(offset)
        assert not self.offsets.complete(offset), "a second completion counts for nothing"

    @rule()
    def commits(self) -> None:
        self.commit = self.offsets.committable()

    @rule(with_map=st.booleans())
    def crash_and_restore(self, with_map: bool) -> None:
        offset, metadata = self.commit
        completed = (decode_completed(offset, metadata) or ()) if with_map else ()
        self.offsets = self.tracker(offset, completed)
        self.position = self.offsets.next_offset
        self.in_flight.clear()
        assert all(o in self.durable for o in self.log if o < self.position), (
            "restoring skipped incomplete work"
        )

    @invariant()
    def committed_never_passes_the_first_incomplete(self) -> None:
        offset, _ = self.offsets.committable()
        incomplete = [o for o in self.log if o not in self.durable]
        assert offset <= min(incomplete, default=self.end), f"{offset} would be committed"

    @invariant()
    def listed_as_complete_are_complete(self) -> None:
        offset, metadata = self.offsets.committable()
        assert len(metadata) <= MAX_METADATA_BYTES
        for first, end in decode_completed(offset, metadata) or ():
            assert first > offset
            assert all(o in self.durable for o in self.log if first <= o < end)

    @invariant()
    def in_flight_here_is_what_is_tracked(self) -> None:
        assert self.offsets.num_incomplete == len(self.in_flight)


OffsetsMachine.TestCase.settings = STEPS
TestOffsets = OffsetsMachine.TestCase


class CommitsHighest(PartitionOffsets):
    """Commits one past the highest complete offset, as a plain consumer with concurrent work does."""

    highest = -1

    def complete(self, offset: int) -> bool:
        self.highest = max(self.highest, offset)
        return super().complete(offset)

    def committable(self) -> tuple[int, str]:
        return self.highest + 1, ""


class OffByOne(PartitionOffsets):
    """Takes the committed offset for the last complete one instead of the next to do."""

    def __init__(self, start: int, completed: Ranges = ()) -> None:
        super().__init__(start + 1 if start else 0, completed)


class MapOneTooFar(PartitionOffsets):
    """Lists one offset more than is complete."""

    def completed_beyond(self) -> Iterator[tuple[int, int]]:
        for first, end in super().completed_beyond():
            yield first, end + 1


@pytest.mark.parametrize("broken", [CommitsHighest, OffByOne, MapOneTooFar])
def test_control_a_broken_tracker_is_caught(broken: type[PartitionOffsets]) -> None:
    machine = type("Control", (OffsetsMachine,), {"tracker": broken})
    search = settings(
        STEPS, max_examples=1_000, derandomize=True, report_multiple_bugs=False, phases=[Phase.generate]
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=search)


def test_hazard_restore_without_a_map_starts_at_the_committed_offset_itself() -> None:
    offsets = PartitionOffsets(7)
    assert offsets.next_offset == 7
    assert offsets.committable() == (7, "")
    assert offsets.register(7)


def test_hazard_restore_with_a_map_skips_exactly_what_it_lists() -> None:
    offsets = PartitionOffsets(5, ((6, 9), (10, 12)))
    assert [offset for offset in range(5, 14) if offsets.register(offset)] == [5, 9, 12, 13]


def test_hazard_restored_map_is_committed_again_until_its_gaps_are_closed() -> None:
    offsets = PartitionOffsets(5, ((6, 9), (20, 22)))
    assert decode_completed(5, offsets.committable()[1]) == ((6, 9), (20, 22))
    offsets.register(5)
    offsets.complete(5)
    assert offsets.committable() == (9, encode_completed(9, [(20, 22)]))


def test_hazard_gaps_of_compaction_and_transaction_markers_do_not_hold_the_commit_back() -> None:
    offsets = PartitionOffsets(0)
    for offset in (3, 10):
        assert offsets.register(offset)
        offsets.complete(offset)
    offsets.advance(12)
    assert offsets.committable() == (12, "")


def test_hazard_back_pressure_counts_work_in_flight_before_it_completes() -> None:
    offsets = PartitionOffsets(0)
    offset = 0
    while not offsets.under_pressure:
        offsets.register(offset)
        offset += 1
    assert offsets.committable() == (0, ""), "the map of now is empty"
    for odd in range(1, offset, 2):
        offsets.complete(odd)
    worst = offsets.committable()[1]
    assert MAX_METADATA_BYTES // 2 < len(worst) <= MAX_METADATA_BYTES
    assert len(decode_completed(0, worst) or ()) == offset // 2, "nothing had to be left out"


def test_back_pressure_ends_when_work_completes() -> None:
    offsets = PartitionOffsets(0)
    registered = 0
    while not offsets.under_pressure:
        offsets.register(registered)
        registered += 1
    for offset in range(registered // 2):
        offsets.complete(offset)
    assert not offsets.under_pressure


def test_hazard_a_map_that_would_grow_too_large_is_cut_short_not_refused() -> None:
    offsets = PartitionOffsets(0)
    for offset in range(20_000):
        offsets.register(offset)
    for offset in range(1, 20_000, 2):
        offsets.complete(offset)
    committed, metadata = offsets.committable()
    ranges = decode_completed(committed, metadata)
    assert ranges is not None
    assert len(metadata) <= MAX_METADATA_BYTES
    assert len(ranges) > 1_000
    assert all(first % 2 == 1 and end == first + 1 for first, end in ranges)


def test_memory_follows_the_work_in_flight_not_the_distance() -> None:
    offsets = PartitionOffsets(0)
    offsets.register(0)
    for offset in range(1, 50_000):
        offsets.register(offset)
        offsets.complete(offset)
    assert offsets.num_incomplete == 1
    assert decode_completed(0, offsets.committable()[1]) == ((1, 50_000),)


def test_head_of_line_is_the_oldest_incomplete_record() -> None:
    offsets = PartitionOffsets(0)
    assert offsets.head_timestamp_ms is None
    offsets.register(0, 111)
    offsets.register(1, 222)
    offsets.complete(0)
    assert offsets.head_timestamp_ms == 222


def test_hazard_a_poll_that_begins_inside_a_restored_range_is_no_rewound_log() -> None:
    offsets = PartitionOffsets(5, ((6, 9),))
    offsets.register(5)
    assert offsets.next_offset == 9
    assert offsets.position == 6, "the record at 6 is still to come, and to be skipped"
    assert not offsets.register(6)
    assert offsets.position == 7
