"""Decides whether to fetch, and whether fetching still works. Pure: credit, positions and time are passed in."""

from collections.abc import Collection, Mapping

from service.ingest.delivery import TopicPartition


class CreditGate:
    """Closes when credit is used up and opens again only well above: each closing costs the records already fetched."""

    def __init__(self, resume_credit: int) -> None:
        self._resume_credit = resume_credit
        self._peak = 0
        self.open = True
        self.num_closings = 0

    def update(self, credit: int, num_incomplete: int) -> bool:
        """Returns whether to fetch. With nothing in flight any credit opens the gate: no completion could raise it."""
        self._peak = max(self._peak, credit)
        low_water = max(1, min(self._resume_credit, self._peak // 2))
        if self.open and credit <= 0:
            self.open = False
            self.num_closings += 1
        elif not self.open and (credit >= low_water or (credit > 0 and num_incomplete == 0)):
            self.open = True
        return self.open


class _Watch:
    __slots__ = ("position", "since_s", "starved")

    def __init__(self, position: int, since_s: float) -> None:
        self.position = position
        self.since_s = since_s
        self.starved = False


class ProgressWatchdog:
    """Finds a consumer that stopped fetching without an error (aiokafka #703, #625, #983).

    A partition is stalled when its position is below the end of its log, it may be fetched, it was asked for in a
    poll that came back empty, and it has not moved for the whole timeout. Waiting for another partition's records is
    no stall.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._watches: dict[TopicPartition, _Watch] = {}

    def observe(
        self,
        now_s: float,
        positions: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        fetchable: Collection[TopicPartition],
    ) -> TopicPartition | None:
        """Compares positions with end offsets; returns a stalled partition if there is one."""
        watches = {}
        for partition, position in positions.items():
            if partition not in fetchable or position >= ends.get(partition, 0):
                continue
            watch = self._watches.get(partition)
            if watch is None or watch.position != position:
                watch = _Watch(position, now_s)
            watches[partition] = watch
        self._watches = watches
        for partition, watch in watches.items():
            if watch.starved and now_s - watch.since_s >= self._stall_timeout_s:
                return partition
        return None

    def empty_poll(self, asked: Collection[TopicPartition]) -> None:
        for partition in asked:
            if partition in self._watches:
                self._watches[partition].starved = True

    def reset(self) -> None:
        self._watches.clear()
