"""The queue of waiting requests, and the deadlines of all live ones."""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

from scheduler.request import Request, RequestStatus

_Entry = tuple[float, int, Request]


class WaitingQueue:
    """Waiting and preempted requests, sorted by due time. `Scheduler.add` bounds its length."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.num_tokens = 0
        """Known tokens of all entries, without the prompts of requests in fork groups."""
        self.num_preempted = 0
        self.num_sharing = 0
        """Entries that belong to a fork group."""

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, request: Request) -> None:
        insort(self._entries, (request.due_s, request.order, request))
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._entries, (request.due_s, request.order))
        _, _, found = self._entries.pop(index)
        assert found is request, f"{request.spec.request_id} is not in the queue"
        self._count(request, -1)

    def peek(self, count: int) -> list[Request]:
        """Return up to `count` requests, first due first."""
        return [request for _, _, request in self._entries[:count]]

    def _count(self, request: Request, sign: int) -> None:
        is_sharing = request.spec.fork_group is not None
        num_shared = len(request.spec.prompt_token_ids) if is_sharing else 0
        self.num_tokens += sign * (request.num_tokens - num_shared)
        self.num_sharing += sign * is_sharing
        self.num_preempted += sign * (request.status is RequestStatus.PREEMPTED)


class Deadlines:
    """Finds the requests whose deadline has passed without visiting the others."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, deadline_s: float, request: Request, num_live: int) -> None:
        """Add a deadline. Entries of finished requests stay until they expire or outnumber the `num_live` live ones."""
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if entry[2].status is not RequestStatus.FINISHED]
            heapify(self._heap)
        heappush(self._heap, (deadline_s, request.order, request))

    def pop_passed(self, now_s: float) -> list[Request]:
        """Remove and return the live requests whose deadline is at or before `now_s`."""
        passed: list[Request] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, request = heappop(self._heap)
            if request.status is not RequestStatus.FINISHED:
                passed.append(request)
        return passed
