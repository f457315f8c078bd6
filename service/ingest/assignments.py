"""The partitions that this consumer holds across rebalances, and where each resumes. Pure; owned by the event loop."""

from collections.abc import Collection, Iterator

from service.ingest.delivery import Delivery, TopicPartition
from service.ingest.offsets import PartitionOffsets, Ranges


class AssignedPartition:
    __slots__ = ("committed", "first_epoch", "offsets")

    def __init__(self, first_epoch: int) -> None:
        self.first_epoch = first_epoch
        """Deliveries of this epoch and later ones count: the partition was ours without a break since."""
        self.offsets: PartitionOffsets | None = None
        """None until the commit of the former owner was read."""
        self.committed: tuple[int, str] | None = None
        """What the group has committed as far as we know; None is unknown or nothing."""


class Assignments:
    """Decides what survives a rebalance.

    A partition keeps its work in flight only when it comes back in the very next generation of the group: then no
    other member can have had it. After a gap (evicted and joined again) another member may have started the same jobs
    under a newer stream epoch, so ours are lost even if the partition returns.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.suspended = False
        """Between revocation and the next assignment nothing may be taken or committed; completions still count."""
        self._generation: int | None = None
        self._partitions: dict[TopicPartition, AssignedPartition] = {}

    def assign(self, assigned: Collection[TopicPartition], generation: int) -> list[TopicPartition]:
        """Takes over a new assignment; returns the partitions whose deliveries are lost."""
        self.epoch += 1
        unbroken = self._generation is not None and generation == self._generation + 1
        before, self._partitions = self._partitions, {}
        lost = []
        for partition in sorted(before.keys() | set(assigned)):
            old = before.get(partition)
            restored = old is not None and old.offsets is not None
            if old is not None and restored and unbroken and partition in assigned:
                self._partitions[partition] = old
                continue
            if restored:
                lost.append(partition)
            if partition in assigned:
                self._partitions[partition] = AssignedPartition(self.epoch)
        self._generation = generation
        self.suspended = False
        return lost

    def disconnect(self) -> None:
        """Notes that the consumer is gone and with it its membership: partitions assigned next start over."""
        self._generation = None
        self.suspended = True

    def restore(
        self, partition: TopicPartition, offsets: PartitionOffsets, committed: tuple[int, str] | None
    ) -> None:
        assigned = self._partitions[partition]
        assert assigned.offsets is None, partition
        assigned.offsets, assigned.committed = offsets, committed

    def restart(self, partition: TopicPartition, offsets: PartitionOffsets) -> None:
        """Restarts a partition whose log was cut back: what is in flight belongs to records that are gone."""
        self.epoch += 1
        assigned = self._partitions[partition] = AssignedPartition(self.epoch)
        assigned.offsets = offsets

    def complete(self, delivery: Delivery) -> bool:
        """Marks a delivery complete; False: it is stale (lost since) or complete already."""
        assigned = self._partitions.get((delivery.topic, delivery.partition))
        if assigned is None or assigned.offsets is None or delivery.assignment_epoch < assigned.first_epoch:
            return False
        return assigned.offsets.complete(delivery.offset)

    def offsets(self, partition: TopicPartition) -> PartitionOffsets | None:
        """Returns the offsets of a restored partition; None otherwise."""
        assigned = self._partitions.get(partition)
        return assigned.offsets if assigned is not None else None

    def active(self) -> Iterator[tuple[TopicPartition, AssignedPartition, PartitionOffsets]]:
        for partition, assigned in self._partitions.items():
            if assigned.offsets is not None:
                yield partition, assigned, assigned.offsets

    def unrestored(self) -> list[TopicPartition]:
        return [partition for partition, assigned in self._partitions.items() if assigned.offsets is None]

    @property
    def num_partitions(self) -> int:
        return len(self._partitions)

    @property
    def num_incomplete(self) -> int:
        return sum(offsets.num_incomplete for _, _, offsets in self.active())

    @property
    def head_timestamp_ms(self) -> int | None:
        heads = [offsets.head_timestamp_ms for _, _, offsets in self.active()]
        return min((head for head in heads if head is not None), default=None)


def starting_point(committed: int | None, completed: Ranges, beginning: int, end: int) -> PartitionOffsets:
    """Returns where to resume in a log that now holds offsets [beginning, end).

    A commit or a map that points past the end describes a log that was cut back or created anew. Trusting it would
    skip new records that reuse old offsets, so it is dropped: doing work again is safe, losing it is not.
    """
    if committed is None or committed > end:
        return PartitionOffsets(beginning)
    if completed and completed[-1][1] > end:
        completed = ()
    return PartitionOffsets(max(committed, beginning), completed)
