"""Carries every job from delivery to outcome. Intake, output and completion do the work; this module calls them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from scheduler.spec import FinishReason, RequestUpdate
from service.engine.engine import Engine
from service.errors import DependencyError, InternalError, JobError
from service.ingest.delivery import Delivery, TopicPartition
from service.worker.completion import Completion
from service.worker.edges import Edges
from service.worker.intake import AdmissionQueue, Intake
from service.worker.job_run import JobRun
from service.worker.outcome import status_of
from service.worker.output import Output
from service.worker.specs import RequestBuilder

log = structlog.get_logger(__name__)


class JobFlow:
    """The callbacks of consumer, engine, publisher and cancel listener. Event loop only; none of them waits."""

    def __init__(
        self,
        edges: Edges,
        builder: RequestBuilder,
        engine: Engine,
        queue: AdmissionQueue,
        token_text: Callable[[int], str],
        *,
        superseded_retry_s: float,
        on_settled: Callable[[], None],
    ) -> None:
        self._edges = edges
        self._engine = engine
        self._queue = queue
        self._completion = Completion(edges)
        self._intake = Intake(edges, builder, engine, queue, self._completion)
        self.output = Output(edges, engine, token_text, self._finish)
        self._superseded_retry_s = superseded_retry_s
        self._on_settled = on_settled
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Run until cancelled. Raises InternalError when a job cannot even be refused: later ones could not either."""
        await self._broken

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        """Take new records from the consumer; each is incomplete until it is settled."""
        for delivery in deliveries:
            self._begin(delivery)

    def on_updates(self, updates: Sequence[RequestUpdate]) -> None:
        self.output.take(updates)
        self._queue.wake_next()

    def on_cancel(self, job_id: str) -> None:
        """Cancel a job of this worker. Jobs that are not fetched yet find the request when they are opened."""
        run = self._edges.table.job(job_id)
        if run is None:
            self._edges.table.note_cancel(job_id)
            return
        run.cancelled = True
        self._queue.leave(run)
        for choice in run.choices:
            if choice.finish is None:
                self._engine.finish(choice.request_id, FinishReason.CANCELLED)

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Abandon the jobs of these partitions: other workers have them now and finish the jobs."""
        runs = self._edges.table.of_partitions(partitions)
        for run in runs:
            self.abandon(run)
        if runs:
            log.info("jobs_handed_over", num_jobs=len(runs), num_partitions=len(partitions))

    def on_fenced(self, job_id: str, epoch: int) -> None:
        """Stop a run that a newer attempt has fenced. The record stays incomplete; the partition's owner settles it."""
        self._edges.metrics.fenced.inc()
        run = self._edges.table.attempt(job_id, epoch)
        if run is None:
            return
        log.warning("job_superseded", job_id=job_id, epoch=epoch)
        self._stop_requests(run)
        # Usually the partition is lost next, which forgets this run. If not, the other attempt did not own the
        # partition either, and the job must not be stuck.
        loop = asyncio.get_running_loop()
        loop.call_later(self._superseded_retry_s, self._retry, run)

    def abandon(self, run: JobRun) -> None:
        """Stop working on a job without publishing anything; its tokens so far stay in the log for the next attempt."""
        run.abandoned = True
        self._stop_requests(run)
        if run.stream is not None:
            run.stream.abandon()
        self._edges.table.remove(run)

    def abandon_all(self) -> int:
        runs = list(self._edges.table)
        for run in runs:
            self.abandon(run)
        return len(runs)

    async def close(self) -> None:
        """End the tasks that still wait for Redis or Kafka on behalf of abandoned jobs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._broken.cancel()

    def _begin(self, delivery: Delivery) -> None:
        run = JobRun.begin(delivery, now_s=self._edges.clock(), wall_s=self._edges.wall_clock())
        self._edges.table.add(run)
        self._edges.table.enter_intake()
        self._spawn(self._guarded(run, self._take_in(run)))

    async def _take_in(self, run: JobRun) -> None:
        try:
            await self._intake.take(run)
        finally:
            self._edges.table.leave_intake(run)

    def _finish(self, run: JobRun) -> None:
        self._spawn(self._guarded(run, self._end(run)))

    async def _end(self, run: JobRun) -> None:
        await self._completion.end(run, status_of(run))

    async def _guarded(self, run: JobRun, work: Coroutine[Any, Any, None]) -> None:
        """End the one job in which our own code failed."""
        try:
            await work
        except Exception as error:
            if run.abandoned:
                return
            if isinstance(error, DependencyError):
                return  # On shutdown the record stays incomplete and is delivered again.
            log.exception("job_broke", job_id=run.job_id, origin=run.origin)
            await self._end_broken(run, error)
        finally:
            self._on_settled()

    async def _end_broken(self, run: JobRun, error: Exception) -> None:
        """End a job in which our own code failed. Each try uses less of the record, since the same error may come
        again, and no record may keep its offset open."""
        self._stop_requests(run)
        run.choices = []
        reason = error
        if not isinstance(error, JobError):
            message = f"{type(error).__name__} in the service; the operator's log has the rest"
            reason = JobError("internal_error", message, job_id=run.job_id or None)
        assert isinstance(reason, JobError)
        for refuse in (self._end_or_refuse, self._completion.refuse_barely):
            try:
                await refuse(run, reason)
                return
            except DependencyError:
                return
            except Exception as failure:
                log.exception("refusal_broke", job_id=run.job_id, origin=run.origin)
                last = failure
        if not self._broken.done():
            self._broken.set_exception(InternalError(f"record {run.origin} cannot be ended: {last!r}"))

    async def _end_or_refuse(self, run: JobRun, reason: JobError) -> None:
        if run.stream is not None:
            await self._completion.end(run, "failed", reason)
        else:
            await self._completion.refuse_record(run, reason)

    def _stop_requests(self, run: JobRun) -> None:
        self._queue.leave(run)
        for choice in run.choices:
            self._edges.table.drop_request(choice.request_id)
            self._engine.finish(choice.request_id, FinishReason.CANCELLED)

    def _retry(self, run: JobRun) -> None:
        if run.abandoned or not self._edges.table.holds(run):
            return
        self._edges.table.remove(run)
        run.abandoned = True
        self._begin(run.delivery)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
