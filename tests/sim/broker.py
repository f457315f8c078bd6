"""A model of a Kafka broker: logs, producers with sequence numbers, committed offsets. Its state outlives an outage."""

import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiokafka.errors import OutOfOrderSequenceNumber

from tests.sim.loop import WALL_START_S, VirtualLoop

Partition = tuple[str, int]
Headers = Sequence[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class Record:
    """As a fetch brings it; the names are aiokafka's."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Unsent:
    """A record on its way to the broker, which gives it offset and timestamp."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass(slots=True)
class Log:
    records: list[Record] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    end: int = 0

    def read(self, offset: int, limit: int) -> list[Record]:
        begin = bisect_left(self.offsets, offset)
        return self.records[begin : begin + limit]


class BrokerObserver:
    """What the auditor sees of a broker, in the order in which it happens."""

    def appended(self, record: Record) -> None: ...
    def committed(self, partition: Partition, offset: int, metadata: str) -> None: ...
    def generation_began(self, commits: dict[Partition, tuple[int, str]]) -> None: ...


class Broker:
    def __init__(self, loop: VirtualLoop, observer: BrokerObserver, topics: dict[str, int]) -> None:
        """`topics`: name to number of partitions."""
        self._loop = loop
        self._observer = observer
        self.topics = topics
        self.logs: dict[Partition, Log] = {
            (topic, partition): Log() for topic, count in topics.items() for partition in range(count)
        }
        self.commits: dict[Partition, tuple[int, str]] = {}
        self._num_producers = 0
        self._next_seq: dict[tuple[int, Partition], int] = {}
        self._waiting_fetches: list[Fetch] = []

    def partition_of(self, topic: str, key: bytes | None) -> Partition:
        return topic, zlib.crc32(key or b"") % self.topics[topic]

    def append(self, partition: Partition, records: Sequence[Unsent], gap: int = 0) -> Record:
        """Appends at the log's end; `gap` offsets before it are left out, as compaction and markers do."""
        log = self.logs[partition]
        log.end += gap
        for unsent in records:
            stamp_ms = round((WALL_START_S + self._loop.now_s) * 1000)
            record = Record(*partition, log.end, stamp_ms, unsent.key, unsent.value, unsent.headers)
            log.records.append(record)
            log.offsets.append(record.offset)
            log.end += 1
            self._observer.appended(record)
        for fetch in self._waiting_fetches:
            fetch.try_answer()
        return record

    def new_producer(self) -> int:
        self._num_producers += 1
        return self._num_producers

    def produce(
        self, producer: int, partition: Partition, first_seq: int, records: Sequence[Unsent]
    ) -> object:
        """Returns the error as a value. A batch that is there already is acknowledged and not appended again."""
        expected = self._next_seq.get((producer, partition), 0)
        if first_seq + len(records) <= expected:
            return None
        if first_seq != expected:
            return OutOfOrderSequenceNumber(f"{partition}: {first_seq} instead of {expected}")
        self._next_seq[producer, partition] = expected + len(records)
        self.append(partition, records)
        return None

    def commit(self, partition: Partition, offset: int, metadata: str) -> None:
        self.commits[partition] = (offset, metadata)
        self._observer.committed(partition, offset, metadata)

    def hold(self, fetch: "Fetch") -> None:
        """Answers a fetch when there are records for it, or after its wait."""
        if not fetch.try_answer():
            self._waiting_fetches.append(fetch)
            self._loop.later(fetch.max_wait_s, self._expire, fetch)

    def begin_generation(self) -> None:
        self._observer.generation_began(self.commits)

    def _expire(self, fetch: "Fetch") -> None:
        self._waiting_fetches = [other for other in self._waiting_fetches if other is not fetch]
        fetch.answer()


class Fetch:
    """A fetch that the broker holds."""

    def __init__(
        self, broker: Broker, positions: dict[Partition, int], limit: int, max_wait_s: float, respond: object
    ) -> None:
        self._broker = broker
        self._positions = positions
        self._limit = limit
        self.max_wait_s = max_wait_s
        self._respond = respond
        self._answered = False

    def try_answer(self) -> bool:
        """Answers if there is something to read; the answer goes out once."""
        logs = self._broker.logs
        if not self._answered and any(logs[p].end > offset for p, offset in self._positions.items()):
            self.answer()
        return self._answered

    def answer(self) -> None:
        if not self._answered:
            self._answered = True
            logs = self._broker.logs
            assert callable(self._respond)
            self._respond(
                {p: (logs[p].read(offset, self._limit), logs[p].end) for p, offset in self._positions.items()}
            )
