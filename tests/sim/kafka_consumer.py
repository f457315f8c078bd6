"""Takes the place of aiokafka's consumer as a member of a group: its coordination, its fetches, its state.

Modelled on aiokafka 0.14: the eager protocol, `on_partitions_revoked` before a join while heartbeats go on, fresh
pauses and positions with every assignment, polls that last as long as a rebalance, commits that are sent again with the
generation of the moment. Not modelled: max_poll_interval (the product polls always), a log that is cut back, records
that cannot be read.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from aiokafka.errors import ConsumerStoppedError, IllegalStateError
from aiokafka.structs import TopicPartition

from tests.sim.broker import Fetch, Partition, Record
from tests.sim.kafka_clients import RETRY_BACKOFF_S, BrokerConnection, Cluster, SimClient
from tests.sim.kafka_coordinator import UNREACHABLE, SimCoordinator, Timing
from tests.sim.loop import OWNER

MAX_WAIT_S = 0.5
FETCH_LIMIT = 64


@dataclass(slots=True, eq=False)
class _Assigned:
    """One partition of the present assignment; a new assignment has new ones."""

    position: int | None = None
    paused: bool = False
    buffer: list[Record] = field(default_factory=list)
    end: int = 0
    """Where the buffer's fetch ended: beyond its last record if the log has gaps there."""


class SimConsumer:
    cluster: Cluster

    def __init__(
        self,
        *,
        session_timeout_ms: int,
        heartbeat_interval_ms: int,
        rebalance_timeout_ms: int,
        request_timeout_ms: int,
        **options: Any,
    ) -> None:
        assert not options["enable_auto_commit"]
        assert options["isolation_level"] == "read_committed"
        self._group_connection = BrokerConnection(self.cluster, request_timeout_ms / 1000)
        self._data_connection = BrokerConnection(self.cluster, request_timeout_ms / 1000)
        self._client = SimClient(self._group_connection, self._data_connection)
        self._coordinator = SimCoordinator(
            self.cluster.group,
            self._group_connection,
            Timing(session_timeout_ms / 1000, heartbeat_interval_ms / 1000, rebalance_timeout_ms / 1000),
            str(OWNER.get()),
            on_revoke=self._revoke,
            on_assign=self._assign,
        )
        self._fetcher = None
        self._closed = False
        self._listener: Any = None
        self._assigned: dict[TopicPartition, _Assigned] = {}
        self._is_assigned = asyncio.Event()
        """Cleared during a rebalance."""
        self._arrived = asyncio.Event()
        self._is_fetching = False
        self._fetches: set[asyncio.Task[None]] = set()

    def subscribe(self, topics: list[str], *, listener: Any) -> None:
        self._listener = listener

    async def start(self) -> None:
        await self._data_connection.call(lambda respond: respond(None))
        self._coordinator.start()
        await self._is_assigned.wait()

    async def stop(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._coordinator.end_tasks()
        for task in self._fetches:
            task.cancel()
        await self._coordinator.leave()
        await self._client.close()

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._assigned)

    def pause(self, *partitions: TopicPartition) -> None:
        for partition in partitions:
            self._assigned[partition].paused = True

    def resume(self, *partitions: TopicPartition) -> None:
        for partition in partitions:
            self._assigned[partition].paused = False
        self._fetch()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        state = self._assigned.get(partition)
        if state is None:
            raise IllegalStateError(f"{partition} is not assigned")
        state.position, state.buffer = offset, []
        self._fetch()

    async def position(self, partition: TopicPartition) -> int:
        state = self._assigned.get(partition)
        if state is None or state.position is None:
            raise IllegalStateError(f"{partition} has no position")
        return state.position

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        beginnings: dict[TopicPartition, int] = await self._ask(lambda: dict.fromkeys(partitions, 0))
        return beginnings

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        logs = self.cluster.broker.logs
        ends: dict[TopicPartition, int] = await self._ask(
            lambda: {key: logs[key.topic, key.partition].end for key in partitions}
        )
        return ends

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        if self._closed:
            raise ConsumerStoppedError
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_ms / 1000
        while True:
            await self._is_assigned.wait()
            self._arrived.clear()
            drained = self._drain(partitions, max_records or FETCH_LIMIT)
            left_s = until_s - loop.time()
            if drained or left_s <= 0:
                return drained
            try:
                async with asyncio.timeout(left_s):
                    await self._arrived.wait()
            except TimeoutError:
                return {}

    async def commit(self, offsets: dict[TopicPartition, tuple[int, str]]) -> None:
        for key in offsets:
            if key not in self._assigned:
                raise IllegalStateError(f"{key} is not assigned")
        await self._coordinator.commit({(key.topic, key.partition): value for key, value in offsets.items()})

    async def _ask(self, look: Any) -> Any:
        while True:
            try:
                return await self._data_connection.call(lambda respond: respond(look()))
            except UNREACHABLE:
                if self._closed:
                    raise
                await asyncio.sleep(RETRY_BACKOFF_S)

    def _drain(
        self, partitions: Collection[TopicPartition], limit: int
    ) -> dict[TopicPartition, list[Record]]:
        drained = {}
        for key in partitions or list(self._assigned):
            state = self._assigned.get(key)
            if state is None or state.paused or not state.buffer or limit <= 0:
                continue
            taken, state.buffer = state.buffer[:limit], state.buffer[limit:]
            limit -= len(taken)
            state.position = taken[-1].offset + 1 if state.buffer else state.end
            drained[key] = taken
        if drained:
            self._fetch()
        return drained

    def _fetch(self) -> None:
        """One fetch in flight, for all partitions that may be fetched and have nothing buffered."""
        if self._is_fetching or self._closed:
            return
        wanted = {
            key: state
            for key, state in self._assigned.items()
            if not state.paused and state.position is not None and not state.buffer
        }
        if wanted:
            self._is_fetching = True
            task = asyncio.get_running_loop().create_task(self._fetch_once(wanted))
            self._fetches.add(task)
            task.add_done_callback(self._fetches.discard)

    async def _fetch_once(self, wanted: dict[TopicPartition, _Assigned]) -> None:
        broker = self.cluster.broker
        positions = {(key.topic, key.partition): state.position for key, state in wanted.items()}
        asked: dict[Partition, int] = {key: offset for key, offset in positions.items() if offset is not None}
        try:
            found = await self._data_connection.call(
                lambda respond: broker.hold(Fetch(broker, asked, FETCH_LIMIT, MAX_WAIT_S, respond))
            )
        except UNREACHABLE:
            await asyncio.sleep(RETRY_BACKOFF_S)
            found = {}
        self._is_fetching = False
        for key, state in wanted.items():
            partition = (key.topic, key.partition)
            if partition not in found or self._assigned.get(key) is not state:
                continue
            records, end = found[partition]
            if state.position != asked[partition] or state.buffer:
                continue  # it was moved meanwhile
            if records:
                state.buffer = list(records)
                state.end = records[-1].offset + 1 if len(records) == FETCH_LIMIT else end
                self._arrived.set()
            else:
                state.position = end
        self._fetch()

    async def _revoke(self) -> None:
        self._is_assigned.clear()
        await self._listener.on_partitions_revoked(set(self._assigned))

    async def _assign(self, partitions: list[Partition]) -> None:
        keys = [TopicPartition(*partition) for partition in partitions]
        self._assigned = {key: _Assigned() for key in keys}
        self._is_assigned.set()
        await self._listener.on_partitions_assigned(keys)
