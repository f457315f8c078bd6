"""How a job ends: stream flushed, result durable, end event out, offset complete, in this order (decision 0002)."""

import structlog

from service.errors import JobError
from service.stream.publisher import Opened, Outcome
from service.wire import DeadLetter, ErrorInfo, Origin, Result, Status
from service.wire.limits import MAX_ID_CHARS
from service.worker.context import Context
from service.worker.digest import digest_of
from service.worker.job_run import JobRun
from service.worker.targets import targets_of
from service.worker.terminal import ending_of, result_of

log = structlog.get_logger(__name__)

PASSED_ON_HEADERS = frozenset({"traceparent", "tracestate"})


class Finisher:
    """Every method may be called once per run and returns when the run is settled or not ours any more."""

    def __init__(self, context: Context) -> None:
        self._c = context

    async def end(self, run: JobRun, status: Status, error: JobError | None = None) -> bool:
        """Write the terminal record of a job whose stream we hold. False: a newer attempt holds it."""
        if error is not None:
            run.error = ErrorInfo.of(error)
        publisher = self._c.publisher
        if not await publisher.flushed(run.job_id, run.epoch):
            return False
        if run.abandoned:
            return True
        result = result_of(
            run,
            status,
            targets_of(run.job, self._c.targets),
            worker=self._c.names.worker,
            now_s=self._c.clock(),
        )
        await self._send_result(run, result)
        if not await publisher.end(run.job_id, run.epoch, ending_of(run, status)):
            return False
        self._observe(run, result)
        self.settle(run)
        return True

    async def refuse_record(self, run: JobRun, error: JobError) -> None:
        """End a record that is no job: dead letter, and a result under the best id it can be filed under."""
        await self._dead_letter(run, error)
        status: Status = "failed" if error.code in UNREADABLE_CODES else "rejected"
        for job_id in (error.job_id, placeholder_id("unparsed", run)):
            if job_id is not None and await self._open_and_end(run, job_id, status, error):
                return
        self.settle(run)

    async def refuse_duplicate(self, run: JobRun, opened: Opened) -> None:
        """Settle a record whose id belongs to another record, without touching that one's result."""
        self._c.metrics.duplicates.inc()
        if not opened.same_digest:
            error = JobError(
                "duplicate_id", f"id: {run.job_id!r} was given to another job before; the limit is one job per id",
                field="id", value=run.job_id, limit="one job per id", job_id=run.job_id,
            )  # fmt: skip
            await self._dead_letter(run, error)
            await self._open_and_end(run, placeholder_id("duplicate", run), "rejected", error)
        self.settle(run)

    def settle(self, run: JobRun) -> None:
        """The record needs nothing more from anybody."""
        self._c.table.remove(run)
        if not run.abandoned:
            self._c.complete(run.delivery)

    async def _open_and_end(self, run: JobRun, job_id: str, status: Status, error: JobError) -> bool:
        """File a refusal under `job_id`. False: that id belongs to another record, or its keys to somebody else."""
        try:
            opened = await self._c.publisher.open(
                job_id, origin=run.origin, digest=digest_of(run.delivery), num_choices=1, stream=True
            )
        except JobError:
            return False
        if opened.outcome is Outcome.DUPLICATE:
            return False
        if opened.outcome is Outcome.OPENED:
            self._c.table.name(run, job_id, opened.epoch)
            self._c.publisher.start(job_id, opened.epoch, attempt=opened.epoch)
            # Fenced or not: the id is this record's, and whoever holds it now files the same refusal.
            await self.end(run, status, error)
            return True
        self.settle(run)
        return True

    async def _send_result(self, run: JobRun, result: Result) -> None:
        passed_on = [(name, value) for name, value in run.delivery.headers if name in PASSED_ON_HEADERS]
        headers = [*passed_on, ("tailrace-attempt", str(run.epoch).encode())]
        await self._c.producer.send(
            self._c.names.results_topic, key=result.id.encode(), value=result.encode(), headers=headers
        )

    async def _dead_letter(self, run: JobRun, error: JobError) -> None:
        delivery = run.delivery
        origin = Origin(
            topic=delivery.topic,
            partition=delivery.partition,
            offset=delivery.offset,
            timestamp_ms=delivery.timestamp_ms,
            attempt=max(1, run.epoch),
            code=error.code,
            message=error.message,
        )
        letter = DeadLetter(delivery.key, delivery.value, delivery.headers, origin)
        try:
            await self._c.producer.send(
                self._c.names.dead_letter_topic,
                key=delivery.key,
                value=delivery.value,
                headers=letter.record_headers(),
            )
        except JobError as too_large:
            # The record came through a topic with a higher limit than ours. Its result still tells what happened.
            log.error("dead_letter_refused", origin=run.origin, reason=too_large.message)
            return
        self._c.metrics.dead_letters.inc()

    def _observe(self, run: JobRun, result: Result) -> None:
        metrics, timings = self._c.metrics, result.timings
        metrics.jobs.labels(status=result.status).inc()
        if run.job is None:
            return
        by_class = run.job.service_class
        for histogram, value in (
            (metrics.queue_time, timings.queued_s),
            (metrics.ttft, timings.ttft_s),
            (metrics.tpot, timings.tpot_s),
            (metrics.e2e, timings.e2e_s),
        ):
            if value is not None:
                histogram.labels(service_class=by_class).observe(value)
        metrics.cached_tokens.inc(run.num_cached_tokens)
        if result.status == "completed" and False not in (result.slo.ttft_met, result.slo.tpot_met):
            metrics.goodput_jobs.labels(service_class=by_class).inc()
        log.info(
            "job_ended",
            job_id=run.job_id,
            status=result.status,
            attempt=run.epoch,
            prompt_tokens=run.num_prompt_tokens,
            completion_tokens=run.num_output_tokens,
            e2e_s=timings.e2e_s,
        )


UNREADABLE_CODES = frozenset(
    {"no_value", "record_too_large", "invalid_utf8", "invalid_json", "not_an_object"}
)
"""The record failed; with any other code it was read and its content refused."""


def placeholder_id(kind: str, run: JobRun) -> str:
    """A legal job id for a record that may not use its own. Redelivery gives the same one."""
    delivery = run.delivery
    suffix = f":{delivery.partition}:{delivery.offset}"
    return f"{kind}:{delivery.topic}"[: MAX_ID_CHARS - len(suffix)] + suffix
