"""The scheduler's state and the only code that changes it: admit, preempt, publish, end."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Final

from scheduler.admission import BlockNeed
from scheduler.blocks import BlockPool
from scheduler.forks import Forks
from scheduler.plan import TokenLogprobs
from scheduler.request import Request, RequestStatus
from scheduler.scheduler_config import SchedulerConfig
from scheduler.spec import FinishReason, RequestUpdate, relegated_due_s
from scheduler.waiting import Deadlines, WaitingQueue

_LENDER_FAILED: Final = "the prompt that this choice shares with another one could not be computed"


class Slots:
    """The slots of the batch: small stable numbers under which the runner keeps its state of each request.

    The lowest free slot is taken first. Slots released since the last plan are remembered for the next one.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        heapify(self._free)
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return heappop(self._free)

    def release(self, slot: int) -> None:
        heappush(self._free, slot)
        self._released.append(slot)

    def take_released(self) -> tuple[int, ...]:
        """Return each slot released since the previous call once, even if it was taken and released again."""
        released = tuple(dict.fromkeys(self._released))
        self._released.clear()
        return released


class UpdateBox:
    """Collects one update per request until the caller takes them; keyed by order, because request ids may recur."""

    def __init__(self) -> None:
        self._updates: dict[int, RequestUpdate] = {}

    def token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Add a new token to the update of `request`."""
        untaken = self._updates.get(request.order)
        token_logprobs = () if logprobs is None else (logprobs,)
        if untaken is None:
            self._updates[request.order] = RequestUpdate(
                request.spec.request_id,
                (token_id,),
                token_logprobs,
                num_cached_tokens=request.num_cached_tokens or 0,
            )
            return
        self._updates[request.order] = replace(
            untaken,
            new_token_ids=(*untaken.new_token_ids, token_id),
            logprobs=untaken.logprobs + token_logprobs,
        )

    def end(self, request: Request, reason: FinishReason, error: str | None) -> None:
        """Add the end of `request` to its update."""
        untaken = self._updates.get(request.order) or RequestUpdate(request.spec.request_id)
        assert untaken.finish is None, f"{request.spec.request_id} ended twice"
        self._updates[request.order] = replace(
            untaken, finish=reason, error=error, num_cached_tokens=request.num_cached_tokens or 0
        )

    def take(self) -> list[RequestUpdate]:
        """Return and clear the updates, in the order of the first event of each."""
        updates = list(self._updates.values())
        self._updates.clear()
        return updates


class State:
    """All requests, blocks and slots. A live request is in `waiting` or `running`; one that has ended with a step in
    flight is only counted, in num_leaving."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.forks = Forks(self.pool)
        self.slots = Slots(config.max_num_seqs)
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        """In order of admission."""
        self.held_back: set[Request] = set()
        """Running requests that skip the step being planned."""
        self.deadlines = Deadlines()
        self.updates = UpdateBox()
        self.num_leaving = 0
        self.num_admissions = 0
        self.num_preemptions = 0
        self.num_forks = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def prefill_backlog_tokens(self) -> int:
        """Tokens that running requests have to compute before they decode."""
        missing = (request.num_missing_tokens for request in self.running)
        return sum(count for count in missing if count > 1)

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of waiting requests; a prompt that several requests share counts once."""
        return self.waiting.num_tokens + self.forks.num_unstarted_tokens

    def enqueue(self, request: Request) -> None:
        """Add a new request to the waiting queue."""
        self.forks.join(request)
        self.requests[request.spec.request_id] = request
        self.waiting.push(request)
        if request.spec.deadline_s is not None:
            self.deadlines.push(request.spec.deadline_s, request, len(self.requests))

    def admit(self, request: Request, need: BlockNeed) -> None:
        """Start a waiting request: give it its blocks and a slot."""
        self.waiting.remove(request)
        self.pool.hold(need.shared)
        own = self.pool.allocate(need.num_new)
        request.block_table = need.shared + own
        request.num_computed_tokens = request.num_settled_tokens = need.num_computed_tokens
        request.num_published_blocks = len(need.shared)
        if need.lender is None:
            self._count_hits(request)
        else:
            self._fork(request, need.lender)
        if need.copied is not None:
            self.forks.copy(need.copied, own[0])
        request.slot = self.slots.take()
        request.status = RequestStatus.RUNNING
        request.history_due = request.spec.sampling.needs_history
        request.num_bypassed = request.num_skipped_steps = 0
        request.blocked_since_s = None
        self.running.append(request)
        self.forks.started(request)
        self.num_admissions += 1

    def preempt(self, victim: Request) -> None:
        """Return a running request without steps in flight to the waiting queue.

        It loses its blocks and slot and keeps its tokens and due time.
        """
        assert victim.num_in_flight == 0, (
            f"{victim.spec.request_id} is preempted while a step of it is in flight"
        )
        self.running.remove(victim)
        self.vacate(victim)
        self.forks.stopped(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(victim)

    def takes_part(self, request: Request) -> bool:
        """Return whether a request runs and was not held back from the step being planned."""
        return request.status is RequestStatus.RUNNING and request not in self.held_back

    def hold_back(self, victims: Sequence[Request]) -> bool:
        """Hold `victims` back from this step if a step of any of them is in flight; return whether that is so.

        Their blocks are still being written, so they cannot be preempted before that step returns.
        """
        if not any(victim.num_in_flight for victim in victims):
            return False
        self.held_back.update(victims)
        return True

    def relegate(self, request: Request) -> None:
        """Move a waiting request behind all that can still meet their deadline; done at most once per request."""
        self.waiting.remove(request)
        request.relegated = True
        request.due_s = relegated_due_s(request.due_s, self.config.ageing_s)
        self.waiting.push(request)

    def publish(self, request: Request) -> None:
        """Make the blocks that its returned steps filled findable in the prefix cache, if their content is valid."""
        num_full = request.num_settled_tokens // self.config.block_size
        if num_full == request.num_published_blocks or not self.config.prefix_caching:
            return
        if request.is_broken or not self.forks.is_trusted(request):
            return
        hashes = request.hash_blocks(num_full, self.pool.block_size)
        for i in range(request.num_published_blocks, num_full):
            self.pool.publish(request.block_table[i], hashes[i])
        request.num_published_blocks = num_full

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a live request and report it. Its blocks and slot are released once no step of it is in flight."""
        del self.requests[request.spec.request_id]
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.forks.stopped(request)
            if request.num_in_flight:
                self.num_leaving += 1
            else:
                self.vacate(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.ended_well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.forks.leave(request)
        self.updates.end(request, reason, error)

    def fail(self, request: Request, error: str) -> None:
        """End a running request whose row failed, and its forks that depend on that row."""
        self.invalidate(request)
        self.end(request, FinishReason.ERROR, error)

    def invalidate(self, request: Request) -> None:
        """Make the K/V of a request whose row failed unavailable to other requests, since all of it may be wrong.

        K/V that the failed row should have written may be missing, so the forks that took it over fail as well.
        """
        if request.is_broken:
            return
        request.is_broken = True
        self.pool.forget(request.block_table)
        for fork in self.forks.distrust(request):
            self.fail(fork, _LENDER_FAILED)

    def leave(self, request: Request) -> None:
        """Release what an ended request still held, when its last step in flight has returned."""
        self.num_leaving -= 1
        self.vacate(request)

    def vacate(self, request: Request) -> None:
        """Release the blocks and the slot of a request."""
        self.forks.cancel_copies(request.block_table)
        self.pool.release(request.block_table)
        self.slots.release(request.slot)
        request.block_table = ()
        request.slot = -1
        request.num_computed_tokens = request.num_settled_tokens = request.num_published_blocks = 0

    def _count_hits(self, request: Request) -> None:
        if request.num_cached_tokens is not None:
            return
        num_prompt = len(request.spec.prompt_token_ids)
        request.num_cached_tokens = min(request.num_computed_tokens, num_prompt)
        self.num_queried_tokens += num_prompt
        self.num_hit_tokens += request.num_cached_tokens

    def _fork(self, request: Request, lender: Request) -> None:
        """Take over from `lender` everything but the blocks: cache count, published blocks and their hashes."""
        self.num_forks += 1
        # The job's prompt was computed once, so the choices report the cache hits of the request that computed it.
        if request.num_cached_tokens is None:
            request.num_cached_tokens = lender.num_cached_tokens
        self.forks.borrowed(request, lender, request.num_computed_tokens)
        num_shared = request.num_published_blocks
        request.num_published_blocks = min(num_shared, lender.num_published_blocks)
        if len(request.block_hashes) < num_shared:
            request.block_hashes = lender.block_hashes[:num_shared]
