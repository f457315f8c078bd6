"""The part of a simulated consumer that lives in the group: joins, heartbeats, commits. Modelled on aiokafka 0.14."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiokafka.errors import (
    CommitFailedError,
    IllegalGenerationError,
    KafkaConnectionError,
    KafkaError,
    RebalanceInProgressError,
    RequestTimedOutError,
    UnknownMemberIdError,
)

from tests.sim.broker import Partition
from tests.sim.group import Group, Joined
from tests.sim.kafka_clients import RETRY_BACKOFF_S, BrokerConnection

GROUP_ERRORS = (UnknownMemberIdError, IllegalGenerationError, RebalanceInProgressError)
UNREACHABLE = (KafkaConnectionError, RequestTimedOutError)


@dataclass(frozen=True, slots=True)
class Timing:
    session_s: float
    heartbeat_s: float
    rebalance_s: float


class SimCoordinator:
    """Has what the product looks at in aiokafka's coordinator: the generation and the names of its tasks."""

    def __init__(
        self,
        group: Group,
        connection: BrokerConnection,
        timing: Timing,
        name: str,
        *,
        on_revoke: Callable[[], Awaitable[None]],
        on_assign: Callable[[list[Partition]], Awaitable[None]],
    ) -> None:
        """`on_revoke` runs before a join, while heartbeats go on; `on_assign` after it."""
        self._group = group
        self._connection = connection
        self._timing = timing
        self._name = name
        self._on_revoke = on_revoke
        self._on_assign = on_assign
        self.generation = -1
        self.member_id = ""
        self._rejoin = asyncio.Event()
        self._rejoin.set()
        self._is_prepared = False
        self._coordination_task: asyncio.Task[None] | None = None
        self._heartbeat_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._coordination_task = asyncio.get_running_loop().create_task(self._coordinate())

    def end_tasks(self) -> None:
        for task in (self._coordination_task, self._heartbeat_task):
            if task is not None:
                task.cancel()

    async def leave(self) -> None:
        member_id = self.member_id
        if member_id:
            await self._connection.call(lambda respond: respond(self._group.leave(member_id)))

    async def commit(self, values: dict[Partition, tuple[int, str]]) -> None:
        """Commits until the broker answers; a request that is on its way survives a cancelled caller, and one that is
        sent again carries the generation of that moment."""
        while True:
            member_id, generation = self.member_id, self.generation
            try:
                await self._connection.call(
                    lambda respond: respond(self._group.commit(member_id, generation, values))  # noqa: B023
                )
            except UNREACHABLE:
                await asyncio.sleep(RETRY_BACKOFF_S)
            except GROUP_ERRORS as error:
                if not isinstance(error, RebalanceInProgressError):
                    self._reset_generation()
                self._rejoin.set()
                raise CommitFailedError("the group has rebalanced") from error
            else:
                return

    def _reset_generation(self) -> None:
        self.generation, self.member_id = -1, ""
        self._rejoin.set()

    async def _coordinate(self) -> None:
        while True:
            await self._rejoin.wait()
            if not self._is_prepared:
                await self._on_revoke()
                self._is_prepared = True
            await self._stop_heartbeat()
            try:
                assigned = await self._join()
            except UNREACHABLE:
                await asyncio.sleep(RETRY_BACKOFF_S)
            except UnknownMemberIdError:
                self._reset_generation()
            except KafkaError:
                continue
            else:
                self._rejoin.clear()
                self._is_prepared = False
                self._heartbeat_task = asyncio.get_running_loop().create_task(self._heartbeat())
                await self._on_assign(assigned)

    async def _join(self) -> list[Partition]:
        group, timing, member_id = self._group, self._timing, self.member_id
        joined: Joined = await self._connection.call(
            lambda respond: group.join(member_id, self._name, timing.session_s, timing.rebalance_s, respond)
        )
        self.member_id, self.generation = joined.member_id, joined.generation
        assigned: list[Partition] = await self._connection.call(
            lambda respond: group.sync(joined.member_id, joined.generation, respond)
        )
        return assigned

    async def _stop_heartbeat(self) -> None:
        task, self._heartbeat_task = self._heartbeat_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _heartbeat(self) -> None:
        while self.member_id:
            await asyncio.sleep(self._timing.heartbeat_s)
            member_id, generation = self.member_id, self.generation
            try:
                await self._connection.call(
                    lambda respond: respond(self._group.heartbeat(member_id, generation))  # noqa: B023
                )
            except UNREACHABLE:
                continue
            except RebalanceInProgressError:
                self._rejoin.set()
            except KafkaError:
                self._reset_generation()
