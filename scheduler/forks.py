"""Fork groups: requests with the same prompt, which share its computed blocks, and the block copies that this takes."""

from scheduler.blocks import BlockPool
from scheduler.request import Request, RequestStatus


class _Group:
    """Live requests with the same prompt, in order of arrival. A running one can lend its blocks to the others."""

    def __init__(self, first: Request) -> None:
        self.first_spec = first.spec
        self.num_prompt_tokens = len(first.spec.prompt_token_ids)
        self.members: list[Request] = []
        self.num_running = 0
        self.distrusted: set[Request] = set()
        """Running members that may have shared blocks with a member whose row failed."""


class Forks:
    """All fork groups by name, and the block copies of the step being planned.

    The source of a copy stays held until its step has returned, and a block is lent only when this plan copies nothing
    onto it. So no source is also a destination within a plan, the order of its copies does not matter, and a step that
    runs again finds its sources unchanged, even if the next step has begun.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._groups: dict[str, _Group] = {}
        self._copies: dict[int, int] = {}
        """Source by destination."""
        self._unsettled: dict[Request, list[Request]] = {}
        """Per running fork, the requests whose rows in the step in flight compute K/V that it took over."""
        self.num_unstarted_tokens = 0
        """Prompt tokens of the groups without a running member, each counted once."""

    def join(self, request: Request) -> None:
        """Add a new waiting request to its group; its prompt, tenant and class must be those of the group."""
        spec = request.spec
        if spec.fork_group is None:
            return
        group = self._groups.get(spec.fork_group)
        if group is None:
            group = self._groups[spec.fork_group] = _Group(request)
            self.num_unstarted_tokens += group.num_prompt_tokens
        first, prompt = group.first_spec, spec.prompt_token_ids
        # The choices of a job share one tuple, so a long prompt is rarely compared token by token.
        is_same = prompt is first.prompt_token_ids or prompt == first.prompt_token_ids
        assert is_same, f"{spec.request_id} forks another prompt"
        assert spec.tenant == first.tenant, f"{spec.request_id} forks another tenant's prompt"
        assert spec.service_class is first.service_class, f"{spec.request_id} forks a prompt of another class"
        group.members.append(request)

    def leave(self, request: Request) -> None:
        """Remove a request that has ended and does not run."""
        group = self._group_of(request)
        if group is None:
            return
        group.members.remove(request)
        if not group.members:
            self.num_unstarted_tokens -= group.num_prompt_tokens
            del self._groups[request.spec.fork_group or ""]

    def started(self, request: Request) -> None:
        """Account for a request that was admitted."""
        group = self._group_of(request)
        if group is None:
            return
        group.num_running += 1
        if group.num_running == 1:
            self.num_unstarted_tokens -= group.num_prompt_tokens

    def stopped(self, request: Request) -> None:
        """Account for a request that was preempted or has ended while running."""
        group = self._group_of(request)
        if group is None:
            return
        group.num_running -= 1
        group.distrusted.discard(request)
        self._unsettled.pop(request, None)
        if group.num_running == 0:
            self.num_unstarted_tokens += group.num_prompt_tokens

    def borrowed(self, fork: Request, lender: Request, num_tokens: int) -> None:
        """Record that a fork takes over the K/V of `num_tokens` tokens at its admission.

        Tokens that are not settled are computed by the step in flight, in rows of the lender or of the requests from
        which the lender itself took them over. If such a row fails, the fork fails too.
        """
        computing = [
            other
            for other in (*self._unsettled.get(lender, ()), lender)
            if other.num_settled_tokens < num_tokens
        ]
        if computing:
            self._unsettled[fork] = computing

    def settled(self) -> None:
        """Forget those dependencies: the step in flight has returned and all of its rows are processed."""
        self._unsettled.clear()

    def distrust(self, request: Request) -> list[Request]:
        """Stop all running members of the group from lending: a row failed, perhaps because of the prompt's K/V.

        Returns the running forks that took over, directly or through another fork, what that row should have computed.
        """
        group = self._groups.get(request.spec.fork_group or "")
        if group is None:
            return []
        group.distrusted.update(self._running(group))
        return [fork for fork, computing in self._unsettled.items() if request in computing]

    def is_trusted(self, request: Request) -> bool:
        """Return whether no row of its group has failed since the request was admitted."""
        group = self._group_of(request)
        return group is None or request not in group.distrusted

    def lender(self, request: Request) -> Request | None:
        """Return a running sibling whose prompt is in the pool before the step planned now; None: there is none."""
        group = self._group_of(request)
        if group is None:
            return None
        ready = (member for member in self._running(group) if self._is_ready(member, group))
        return next(ready, None)

    def is_started(self, request: Request) -> bool:
        """Return whether a running sibling has computed, or is computing, the prompt."""
        group = self._group_of(request)
        return group is not None and bool(self._running(group))

    def must_wait(self, request: Request) -> bool:
        """Return whether a sibling that runs or is ahead in the waiting queue computes the prompt for `request`."""
        group = self._group_of(request)
        if group is None:
            return False
        position = (request.due_s, request.order)
        return bool(self._running(group)) or any(
            member.status <= RequestStatus.PREEMPTED and (member.due_s, member.order) < position
            for member in group.members
        )

    def copy(self, source: int, destination: int) -> None:
        """Plan a copy of a held block onto a newly allocated one, before the step being planned."""
        self._pool.hold((source,))
        self._copies[destination] = source

    def cancel_copies(self, destinations: tuple[int, ...]) -> None:
        """Drop planned copies onto these blocks, which are being released."""
        if not self._copies:
            return
        for block in destinations:
            source = self._copies.pop(block, None)
            if source is not None:
                self._pool.release((source,))

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return and clear the planned copies as (source, destination)."""
        copies = tuple((source, destination) for destination, source in self._copies.items())
        self._copies.clear()
        return copies

    def copied(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Release the sources of these copies, whose step has returned."""
        self._pool.release([source for source, _ in copies])

    def _group_of(self, request: Request) -> _Group | None:
        name = request.spec.fork_group
        return None if name is None else self._groups[name]

    def _running(self, group: _Group) -> list[Request]:
        if not group.num_running:
            return []
        return [
            member
            for member in group.members
            if member.status is RequestStatus.RUNNING and member not in group.distrusted
        ]

    def _is_ready(self, member: Request, group: _Group) -> bool:
        if member.num_computed_tokens < group.num_prompt_tokens:
            return False
        return not self._copies or self._copies.keys().isdisjoint(member.block_table)
