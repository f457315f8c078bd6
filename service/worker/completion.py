"""How a job ends: result decided, result durable, end event out, offset complete, in this order (decision 0002)."""

import structlog

from service.errors import InternalError, JobError
from service.ingest.producer import WithdrawnError
from service.stream.publisher import Opened, Outcome
from service.stream.writer import AttemptWriter
from service.wire import DeadLetter, ErrorInfo, Origin, Result, Status, parse_result
from service.wire.job import fingerprint
from service.wire.limits import MAX_ID_CHARS
from service.worker.edges import Edges
from service.worker.job_run import JobRun
from service.worker.outcome import UNREADABLE_CODES, ending_of, result_of

log = structlog.get_logger(__name__)

PASSED_ON_HEADERS = frozenset({"traceparent", "tracestate"})


class Completion:
    """Ends runs. Each method may be called once per run and returns when the run is settled or another attempt has
    it."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def end(self, run: JobRun, status: Status, error: JobError | None = None) -> bool:
        """Publish the outcome of a job whose stream this worker writes. False: a newer attempt writes it."""
        if error is not None:
            run.error = ErrorInfo.of(error)
        result = result_of(
            run,
            status,
            worker=self._edges.names.worker,
            now_s=self._edges.clock(),
        )
        record, stream = result.encode(), _stream_of(run)
        if not await stream.decide(record):
            return False
        return run.abandoned or await self._tell(run, stream, result, record)

    async def repeat(self, run: JobRun, opened: Opened) -> bool:
        """End a job as an earlier attempt had decided. False: the stored value is no result of ours.

        Its record may be on the topic already, or in flight: only the same bytes may follow it, whatever was
        requested since.
        """
        assert opened.decided is not None, run.job_id
        try:
            result = parse_result(opened.decided)
        except InternalError as error:
            log.error("decided_result_unreadable", job_id=run.job_id, reason=str(error))
            return False
        stream = _stream_of(run)
        standing = [choice.text for choice in opened.resumed[: len(result.choices)]]
        lost = stream.attempt.streamed and standing != [choice.text for choice in result.choices]
        if lost:
            stream.restart()
        stream.start()
        if lost:  # The log was evicted or cut: the stream must match the result.
            for choice in result.choices:
                stream.delta(choice.index, choice.text, choice.token_ids or ())
        if await stream.flushed() and not run.abandoned:
            await self._tell(run, stream, result, opened.decided)
        return True

    async def _tell(self, run: JobRun, stream: AttemptWriter, result: Result, record: bytes) -> bool:
        """Send the decided outcome. False: a newer attempt has the stream and sends the same."""
        try:
            await self._send_result(run, result.id, record)
        except WithdrawnError:
            return True
        if not await stream.end(ending_of(result)):
            return False
        self._observe(run, result)
        self.settle(run)
        return True

    async def refuse_record(self, run: JobRun, error: JobError) -> None:
        """End a record that is no job: send a dead letter, and a result under the best id available."""
        await self._dead_letter(run, error)
        status: Status = "failed" if error.code in UNREADABLE_CODES else "rejected"
        for job_id in (error.job_id, placeholder_id("unparsed", run)):
            if job_id is not None and await self._open_and_end(run, job_id, status, error):
                return
        self.settle(run)

    async def refuse_barely(self, run: JobRun, error: JobError) -> None:
        """Send, as a last resort, a result without a stream that contains nothing from the record."""
        job_id = placeholder_id("unparsed", run)
        result = Result(
            id=job_id,
            status="failed",
            attempt=run.number,
            worker=self._edges.names.worker,
            error=ErrorInfo.of(error),
        )
        await self._edges.producer.send(
            self._edges.names.results_topic, key=job_id.encode(), value=result.encode()
        )
        log.error("job_refused_barely", origin=run.origin, result=job_id)
        self.settle(run)

    def suppress(self, run: JobRun) -> None:
        """Settle a redelivery of a record that has ended."""
        self._edges.metrics.duplicates.inc()
        log.info("redelivery_suppressed", job_id=run.job_id, origin=run.origin)
        self.settle(run)

    async def refuse_duplicate(self, run: JobRun, opened: Opened) -> None:
        """Settle a record whose id belongs to another record, and keep that record's result."""
        self._edges.metrics.duplicates.inc()
        log.info(
            "duplicate_suppressed", job_id=run.job_id, origin=run.origin, same_content=opened.same_content,
            fate=opened.fate,
        )  # fmt: skip
        if not opened.same_content:
            error = JobError(
                "duplicate_id", f"id: {run.job_id!r} was given to another job before; the limit is one job per id",
                field="id", value=run.job_id, limit="one job per id", job_id=run.job_id,
            )  # fmt: skip
            await self._dead_letter(run, error)
            if await self._open_and_end(run, placeholder_id("duplicate", run), "rejected", error):
                return  # Settled, or fenced. A fenced one is tried again: the other attempt may have lost the record.
        self.settle(run)

    def settle(self, run: JobRun) -> None:
        """Mark the record as settled."""
        self._edges.table.remove(run)
        if not run.abandoned:
            self._edges.complete(run.delivery)

    async def _open_and_end(self, run: JobRun, job_id: str, status: Status, error: JobError) -> bool:
        """Publish a refusal under `job_id`. False: the id belongs to another record, or its keys to another program."""
        publisher = self._edges.publisher
        try:
            opened = await publisher.open(
                job_id,
                origin=run.origin,
                fingerprint=fingerprint(run.delivery.value),
                num_choices=1,
                stream=True,
                refusal=True,
            )
        except JobError:
            return False
        if opened.outcome is Outcome.DUPLICATE:
            return False
        if opened.stream is not None:
            if run.abandoned:
                opened.stream.abandon()  # it was lost while the stream was being opened
                return True
            self._edges.table.name(run, job_id, opened)
            if opened.decided is not None and await self.repeat(run, opened):
                return True
            _stream_of(run).start()
            if await self.end(run, status, error):
                return True
            # Fenced: another attempt at this record publishes the same refusal, or another record has taken the id.
            return run.abandoned or await publisher.origin_of(job_id) == run.origin
        self.settle(run)
        return True

    async def _send_result(self, run: JobRun, job_id: str, record: bytes) -> None:
        passed_on = [(name, value) for name, value in run.delivery.headers if name in PASSED_ON_HEADERS]
        headers = [*passed_on, ("tailrace-attempt", str(run.number).encode())]
        await self._edges.producer.send(
            self._edges.names.results_topic,
            key=job_id.encode(),
            value=record,
            headers=headers,
            wanted=lambda: not run.abandoned,
        )

    async def _dead_letter(self, run: JobRun, error: JobError) -> None:
        delivery = run.delivery
        origin = Origin(
            topic=delivery.topic,
            partition=delivery.partition,
            offset=delivery.offset,
            timestamp_ms=delivery.timestamp_ms,
            attempt=run.number,
            code=error.code,
            message=error.message,
        )
        letter = DeadLetter(delivery.key, delivery.value, delivery.headers, origin)
        try:
            await self._edges.producer.send(
                self._edges.names.dead_letter_topic,
                key=delivery.key,
                value=delivery.value,
                headers=letter.record_headers(),
                optional=True,
                wanted=lambda: not run.abandoned,
            )
        except JobError as refused:
            # The record came from a topic that allows larger records or other keys than ours. Its result says so.
            log.error("dead_letter_refused", origin=run.origin, reason=refused.message)
            return
        self._edges.metrics.dead_letters.inc()

    def _observe(self, run: JobRun, result: Result) -> None:
        metrics, timings = self._edges.metrics, result.timings
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
            attempt=run.number,
            prompt_tokens=result.usage.prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
            e2e_s=timings.e2e_s,
        )


def _stream_of(run: JobRun) -> AttemptWriter:
    assert run.stream is not None, f"job {run.job_id} ends before its stream was opened"
    return run.stream


def placeholder_id(kind: str, run: JobRun) -> str:
    """Return a legal job id for a record that may not use its own; the same one at each redelivery."""
    delivery = run.delivery
    suffix = f":{delivery.partition}:{delivery.offset}"
    return f"{kind}:{delivery.topic}"[: MAX_ID_CHARS - len(suffix)] + suffix
