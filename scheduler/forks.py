"""Requests with one prompt: who lends its computed blocks to whom, and the copies that sharing them takes."""

from scheduler.blocks import BlockPool
from scheduler.request import Request, RequestStatus


class _Group:
    """Live requests with the same prompt, in order of arrival; any of them can lend it to the others."""

    def __init__(self, first: Request) -> None:
        self.first_spec = first.spec
        self.num_prompt_tokens = len(first.spec.prompt_token_ids)
        self.members: list[Request] = []
        self.num_running = 0
        self.distrusted: set[Request] = set()
        """Running members that shared, or may have shared, blocks with one whose row failed."""


class Forks:
    """The groups, by the name that their requests give, and the block copies of the step being planned.

    A copy's source stays held until its step has returned, and a block is lent only when no copy onto it is
    pending. So no source is also a destination within a plan, the order of its copies does not matter, and a step
    that has to run again finds its sources as they were, even if the next one has begun.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._groups: dict[str, _Group] = {}
        self._copies: dict[int, int] = {}
        """Source by destination."""
        self._unsettled: dict[Request, list[Request]] = {}
        """By running fork: whose rows in the step that is out compute some of what it took over."""
        self.num_unstarted_tokens = 0
        """Prompt tokens of the groups of which nobody runs, each counted once."""

    def join(self, request: Request) -> None:
        """A request has come; it waits."""
        spec = request.spec
        if spec.fork_group is None:
            return
        group = self._groups.get(spec.fork_group)
        if group is None:
            group = self._groups[spec.fork_group] = _Group(request)
            self.num_unstarted_tokens += group.num_prompt_tokens
        first, prompt = group.first_spec, spec.prompt_token_ids
        is_same = (
            prompt is first.prompt_token_ids or prompt == first.prompt_token_ids
        )  # a long one is looked at once
        assert is_same, f"{spec.request_id} forks another prompt"
        assert spec.tenant == first.tenant, f"{spec.request_id} forks another tenant's prompt"
        assert spec.service_class is first.service_class, f"{spec.request_id} forks out of its class"
        group.members.append(request)

    def leave(self, request: Request) -> None:
        """A request has ended; it runs no more."""
        group = self._group_of(request)
        if group is None:
            return
        group.members.remove(request)
        if not group.members:
            self.num_unstarted_tokens -= group.num_prompt_tokens
            del self._groups[request.spec.fork_group or ""]

    def started(self, request: Request) -> None:
        group = self._group_of(request)
        if group is None:
            return
        group.num_running += 1
        if group.num_running == 1:
            self.num_unstarted_tokens -= group.num_prompt_tokens

    def stopped(self, request: Request) -> None:
        group = self._group_of(request)
        if group is None:
            return
        group.num_running -= 1
        group.distrusted.discard(request)
        self._unsettled.pop(request, None)
        if group.num_running == 0:
            self.num_unstarted_tokens += group.num_prompt_tokens

    def borrowed(self, fork: Request, lender: Request, num_tokens: int) -> None:
        """A fork that is being admitted takes over the K/V of that many tokens.

        What is not settled is computed by the one step that can be out while another is planned, in rows of the
        lender or of those that the lender took over from in this very plan.
        """
        computing = [
            other
            for other in (*self._unsettled.get(lender, ()), lender)
            if other.num_settled_tokens < num_tokens
        ]
        if computing:
            self._unsettled[fork] = computing

    def settled(self) -> None:
        """The step that was out is back, and all of its rows have been looked at."""
        self._unsettled.clear()

    def distrust(self, request: Request) -> list[Request]:
        """A row of it failed, maybe because of the prompt's K/V: those that have it lend it to nobody more.

        Returns the running forks that took over, at first or second hand, what that row should have computed.
        """
        group = self._groups.get(request.spec.fork_group or "")
        if group is None:
            return []
        group.distrusted.update(self._running(group))
        return [fork for fork, computing in self._unsettled.items() if request in computing]

    def is_trusted(self, request: Request) -> bool:
        """No sibling's row has failed since it runs."""
        group = self._group_of(request)
        return group is None or request not in group.distrusted

    def lender(self, request: Request) -> Request | None:
        """A running sibling whose prompt's K/V is in the pool before a step that is planned now."""
        group = self._group_of(request)
        if group is None:
            return None
        ready = (member for member in self._running(group) if self._is_ready(member, group))
        return next(ready, None)

    def is_started(self, request: Request) -> bool:
        """Whether a running sibling has computed, or is computing, the prompt for `request` too."""
        group = self._group_of(request)
        return group is not None and bool(self._running(group))

    def must_wait(self, request: Request) -> bool:
        """Whether a sibling runs, or comes first in the queue, that computes the prompt for `request` too."""
        group = self._group_of(request)
        if group is None:
            return False
        place = (request.due_s, request.order)
        return bool(self._running(group)) or any(
            member.status <= RequestStatus.PREEMPTED and (member.due_s, member.order) < place
            for member in group.members
        )

    def copy(self, source: int, destination: int) -> None:
        """Have a held block copied onto a newly allocated one before the step that is being planned."""
        self._pool.hold((source,))
        self._copies[destination] = source

    def cancel_copies(self, destinations: tuple[int, ...]) -> None:
        """Whoever the copies were for gives these blocks back."""
        if not self._copies:
            return
        for block in destinations:
            source = self._copies.pop(block, None)
            if source is not None:
                self._pool.release((source,))

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) for the plan that is handed out now."""
        copies = tuple((source, destination) for destination, source in self._copies.items())
        self._copies.clear()
        return copies

    def copied(self, copies: tuple[tuple[int, int], ...]) -> None:
        """The step that had these copies has returned."""
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
