"""Everything the scheduler remembers, and the only code that changes it: admit, preempt, publish, end."""

from scheduler.admission import BlockNeed
from scheduler.blocks import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.policy import relegated_due_s
from scheduler.request import Request, RequestStatus
from scheduler.seats import Seats
from scheduler.spec import FinishReason
from scheduler.updates import UpdateBox
from scheduler.waiting import Deadlines, WaitingQueue


class State:
    """Live requests are in `waiting` or `running`; an ended one that its step still uses is only counted."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.seats = Seats(config.max_num_seqs)
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        """In order of admission."""
        self.deadlines = Deadlines()
        self.updates = UpdateBox()
        self.num_leaving = 0
        self.num_admissions = 0
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def prefill_backlog_tokens(self) -> int:
        missing = (request.num_missing_tokens for request in self.running)
        return sum(count for count in missing if count > 1)

    def enqueue(self, request: Request) -> None:
        self.requests[request.spec.request_id] = request
        self.waiting.push(request)
        if request.spec.deadline_s is not None:
            self.deadlines.push(request.spec.deadline_s, request, len(self.requests))

    def admit(self, request: Request, need: BlockNeed) -> None:
        """Give a waiting request its blocks and a seat."""
        self.waiting.remove(request)
        self.pool.hold(need.hits)
        request.block_table = need.hits + self.pool.allocate(need.num_new)
        num_cached = len(need.hits) * self.pool.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_cached, len(request.spec.prompt_token_ids))
            self.num_queried_tokens += len(request.spec.prompt_token_ids)
            self.num_hit_tokens += request.num_cached_tokens
        request.num_computed_tokens = num_cached
        request.num_published_blocks = len(need.hits)
        request.seat = self.seats.take()
        request.status = RequestStatus.RUNNING
        request.history_due = request.spec.sampling.needs_history
        request.num_bypassed = request.num_skipped_steps = 0
        request.blocked_since_s = None
        self.running.append(request)
        self.num_admissions += 1

    def preempt(self, victim: Request) -> None:
        """Take everything from a running request; it keeps its tokens and its place in the order."""
        assert victim.num_in_flight == 0, f"{victim.spec.request_id} is preempted while its step runs"
        self.running.remove(victim)
        self.vacate(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(victim)

    def relegate(self, request: Request) -> None:
        """Put a waiting request behind all that can still be on time; happens once."""
        self.waiting.remove(request)
        request.relegated = True
        request.due_s = relegated_due_s(request.due_s, self.config.ageing_s)
        self.waiting.push(request)

    def publish(self, request: Request) -> None:
        """Make the blocks that its last step filled findable by others."""
        num_full = request.num_computed_tokens // self.config.block_size
        if num_full == request.num_published_blocks or not self.config.enable_prefix_caching:
            return
        hashes = request.hash_blocks(num_full, self.pool.block_size)
        for i in range(request.num_published_blocks, num_full):
            self.pool.publish(request.block_table[i], hashes[i])
        request.num_published_blocks = num_full

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Report the end; blocks and seat go back now, or when the step that uses them returns."""
        del self.requests[request.spec.request_id]
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            if request.num_in_flight:
                self.num_leaving += 1
            else:
                self.vacate(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.updates.end(request, reason, error)

    def leave(self, request: Request, *, is_broken: bool) -> None:
        """The last step of a request that had already ended is back."""
        if is_broken:
            self.pool.forget(request.block_table)
        self.num_leaving -= 1
        self.vacate(request)

    def vacate(self, request: Request) -> None:
        self.pool.release(request.block_table)
        self.seats.give_back(request.seat)
        request.block_table = ()
        request.seat = -1
        request.num_computed_tokens = request.num_published_blocks = 0
