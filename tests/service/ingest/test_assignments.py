"""What survives a rebalance, and where a partition starts."""

import pytest

from service.ingest.assignments import Assignments, starting_point
from service.ingest.delivery import Delivery
from service.ingest.offsets import PartitionOffsets

P0, P1 = ("jobs", 0), ("jobs", 1)


def delivery(assignments: Assignments, offset: int, partition: int = 0) -> Delivery:
    return Delivery("jobs", partition, offset, assignments.epoch, None, b"", (), 0)


def restored(partitions: list[tuple[str, int]], generation: int = 1) -> Assignments:
    assignments = Assignments()
    assert assignments.assign(partitions, generation) == []
    for partition in partitions:
        assignments.restore(partition, PartitionOffsets(0), None)
    return assignments


def take(assignments: Assignments, offset: int, partition: int = 0) -> Delivery:
    offsets = assignments.offsets(("jobs", partition))
    assert offsets is not None
    assert offsets.register(offset)
    return delivery(assignments, offset, partition)


def test_kept_partition_keeps_its_deliveries_in_flight() -> None:
    assignments = restored([P0, P1])
    mine, theirs = take(assignments, 0), take(assignments, 0, partition=1)
    assignments.suspended = True
    assert assignments.assign([P0], generation=2) == [P1]
    assert assignments.complete(mine)
    assert not assignments.complete(theirs)
    assert assignments.unrestored() == []
    offsets = assignments.offsets(P0)
    assert offsets is not None
    assert offsets.committable() == (1, "")


def test_completion_during_a_rebalance_counts() -> None:
    assignments = restored([P0])
    mine = take(assignments, 0)
    assignments.suspended = True
    assert assignments.complete(mine)


def test_partition_that_returns_after_a_missed_generation_is_lost_first() -> None:
    """Evicted and joined again: another member may have started the same jobs under a newer stream epoch."""
    assignments = restored([P0])
    mine = take(assignments, 0)
    assert assignments.assign([P0], generation=3) == [P0]
    assert assignments.unrestored() == [P0]
    assignments.restore(P0, PartitionOffsets(0), None)
    again = take(assignments, 0)
    assert not assignments.complete(mine), "a completion from before the loss is stale"
    assert assignments.complete(again)


def test_partition_that_returns_from_another_owner_starts_over() -> None:
    assignments = restored([P0])
    mine = take(assignments, 0)
    assert assignments.assign([], generation=2) == [P0]
    assert assignments.assign([P0], generation=3) == []
    assignments.restore(P0, PartitionOffsets(0), None)
    take(assignments, 0)
    assert not assignments.complete(mine)


def test_new_connection_keeps_nothing() -> None:
    assignments = restored([P0])
    take(assignments, 0)
    assignments.disconnect()
    assert assignments.assign([P0], generation=2) == [P0]


def test_partition_never_restored_is_not_reported_lost() -> None:
    assignments = Assignments()
    assignments.assign([P0], 1)
    assert assignments.assign([], 2) == []


def test_restart_makes_earlier_deliveries_stale() -> None:
    assignments = restored([P0])
    mine = take(assignments, 0)
    assignments.restart(P0, PartitionOffsets(0))
    again = take(assignments, 0)
    assert not assignments.complete(mine)
    assert assignments.complete(again)


@pytest.mark.parametrize(
    ("committed", "completed", "expected"),
    [
        pytest.param(None, (), 10, id="nothing committed: the beginning"),
        pytest.param(15, (), 15, id="the committed offset itself"),
        pytest.param(5, (), 10, id="committed offset removed by retention: the beginning"),
        pytest.param(20, (), 20, id="all done: the end"),
        pytest.param(21, (), 10, id="commit of a log that was cut back: the beginning"),
    ],
)
def test_starting_point(committed: int | None, completed: tuple[()], expected: int) -> None:
    assert starting_point(committed, completed, 10, 20).next_offset == expected


def test_map_of_a_log_that_was_cut_back_is_dropped() -> None:
    offsets = starting_point(12, ((13, 25),), 10, 20)
    assert [offset for offset in range(12, 20) if offsets.register(offset)] == list(range(12, 20))
    offsets = starting_point(12, ((13, 20),), 10, 20)
    assert [offset for offset in range(12, 20) if offsets.register(offset)] == [12]


def test_map_survives_retention_that_removed_the_committed_offset() -> None:
    offsets = starting_point(5, ((6, 12), (14, 16)), 10, 20)
    assert [offset for offset in range(10, 20) if offsets.register(offset)] == [12, 13, 16, 17, 18, 19]
