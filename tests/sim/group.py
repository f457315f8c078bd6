"""A model of a consumer group's coordinator: members, generations, rebalances (eager protocol), session timeouts."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from aiokafka.errors import (
    IllegalGenerationError,
    KafkaError,
    OffsetMetadataTooLargeError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)

from tests.sim.broker import Broker, Partition
from tests.sim.loop import VirtualLoop
from tests.sim.network import Respond
from tests.sim.ownership import Ownership

MAX_METADATA_BYTES = 4096
P_MOVE = 0.3
"""How often a partition moves although its owner is still there: assignors are not always sticky."""


class Phase(Enum):
    EMPTY = auto()
    PREPARING = auto()
    """Waits for all members to join."""
    COMPLETING = auto()
    """Waits for the leader's assignment."""
    STABLE = auto()


@dataclass(slots=True, eq=False)
class Member:
    id: str
    session_s: float
    rebalance_s: float
    expires_s: float
    join: Respond | None = None
    sync: Respond | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    member_id: str
    generation: int
    is_leader: bool


@dataclass(slots=True)
class Group:
    """One group with one topic. Every method that a client calls returns an error as a value, or answers later."""

    loop: VirtualLoop
    rng: random.Random
    broker: Broker
    topic: str
    ownership: Ownership
    on_event: Callable[[str], None]
    phase: Phase = Phase.EMPTY
    generation: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    owners: dict[Partition, str] = field(default_factory=dict)
    _num_members: int = 0
    _deadline: Any = None

    def join(self, member_id: str, name: str, session_s: float, rebalance_s: float, respond: Respond) -> None:
        if member_id and member_id not in self.members:
            respond(UnknownMemberIdError())
            return
        if not member_id:
            self._num_members += 1
            member_id = f"{name}-{self._num_members}"
            self.members[member_id] = Member(member_id, session_s, rebalance_s, 0.0)
            self.loop.later(session_s, self._check_session, member_id)
        member = self.members[member_id]
        self._touch(member)
        if member.join is not None:
            member.join(RebalanceInProgressError())  # an earlier request, whose connection is gone
        member.join = respond
        if self.phase is not Phase.PREPARING:
            self._prepare()
        self._complete_if_all_joined()

    def sync(self, member_id: str, generation: int, respond: Respond) -> None:
        error = self._check(member_id, generation)
        if error is None and self.phase is Phase.PREPARING:
            error = RebalanceInProgressError()
        if error is not None:
            respond(error)
            return
        member = self.members[member_id]
        self._touch(member)
        if self.phase is Phase.STABLE:
            respond(self._assigned_to(member_id))
            return
        member.sync = respond
        if member_id == self._leader:
            self._assign()

    def heartbeat(self, member_id: str, generation: int) -> KafkaError | None:
        error = self._check(member_id, generation)
        if error is None:
            self._touch(self.members[member_id])
            self.ownership.heartbeat(name_of(member_id), generation, self.loop.now_s)
            if self.phase is Phase.PREPARING:
                error = RebalanceInProgressError()
        return error

    def leave(self, member_id: str) -> KafkaError | None:
        if member_id not in self.members:
            return UnknownMemberIdError()
        self._remove(member_id, "left")
        return None

    def commit(
        self, member_id: str, generation: int, offsets: dict[Partition, tuple[int, str]]
    ) -> KafkaError | None:
        """The broker does not look at who owns a partition: the generation is all that it checks."""
        error = self._check(member_id, generation)
        if error is None and self.phase is Phase.COMPLETING:
            error = RebalanceInProgressError()
        if error is not None:
            return error
        if any(len(metadata) > MAX_METADATA_BYTES for _, metadata in offsets.values()):
            return OffsetMetadataTooLargeError()
        self._touch(self.members[member_id])
        for partition in sorted(offsets):
            self.broker.commit(partition, *offsets[partition])
        return None

    @property
    def _leader(self) -> str:
        return next(iter(self.members))

    def _check(self, member_id: str, generation: int) -> KafkaError | None:
        if member_id not in self.members:
            return UnknownMemberIdError()
        return None if generation == self.generation else IllegalGenerationError()

    def _touch(self, member: Member) -> None:
        member.expires_s = self.loop.now_s + member.session_s

    def _check_session(self, member_id: str) -> None:
        member = self.members.get(member_id)
        if member is None:
            return
        if member.join is not None:
            self._touch(member)  # the broker waits, not the member
        left_s = member.expires_s - self.loop.now_s
        if left_s > 1e-9:
            self.loop.later(left_s, self._check_session, member_id)
        else:
            self._remove(member_id, "evicted")

    def _remove(self, member_id: str, why: str) -> None:
        self.on_event(f"member {member_id} {why}")
        member = self.members.pop(member_id)
        for respond in (member.join, member.sync):
            if respond is not None:
                respond(UnknownMemberIdError())
        if not self.members:
            self.phase = Phase.EMPTY
            self.generation += 1
        elif self.phase is Phase.PREPARING:
            self._complete_if_all_joined()
        else:
            self._prepare()

    def _prepare(self) -> None:
        for member in self.members.values():
            if member.sync is not None:
                member.sync(RebalanceInProgressError())
                member.sync = None
        self.phase = Phase.PREPARING
        limit_s = max(member.rebalance_s for member in self.members.values())
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.later(limit_s, self._give_up_waiting)
        self._complete_if_all_joined()

    def _give_up_waiting(self) -> None:
        if self.phase is Phase.PREPARING:
            for member_id in [member.id for member in self.members.values() if member.join is None]:
                self.on_event(f"member {member_id} did not join in time")
                del self.members[member_id]
            if self.members:
                self._complete_if_all_joined()
            else:
                self.phase = Phase.EMPTY

    def _complete_if_all_joined(self) -> None:
        if self.phase is not Phase.PREPARING or any(m.join is None for m in self.members.values()):
            return
        self.generation += 1
        self.phase = Phase.COMPLETING
        self.broker.begin_generation()
        self.on_event(f"generation {self.generation}: {', '.join(self.members)}")
        for member in list(self.members.values()):
            respond, member.join = member.join, None
            self._touch(member)
            assert respond is not None
            respond(Joined(member.id, self.generation, member.id == self._leader))

    def _assign(self) -> None:
        names = list(self.members)
        for partition in range(self.broker.topics[self.topic]):
            key = (self.topic, partition)
            if self.owners.get(key) not in self.members or self.rng.random() < P_MOVE:
                self.owners[key] = self.rng.choice(names)
        self.phase = Phase.STABLE
        for member in self.members.values():
            if member.sync is not None:
                member.sync(self._assigned_to(member.id))
                member.sync = None

    def _assigned_to(self, member_id: str) -> list[Partition]:
        assigned = [partition for partition, owner in sorted(self.owners.items()) if owner == member_id]
        self.ownership.assigned(name_of(member_id), self.generation, assigned)
        return assigned


def name_of(member_id: str) -> str:
    return member_id.rpartition("-")[0]
