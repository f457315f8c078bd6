"""Summarizes documents of any length through the service, one row for each."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.client import Finished
from service.errors import JobError
from service.pipelines.documents import read_document
from service.pipelines.map_reduce import Budget, Node, summarize_text
from service.pipelines.rows import Row, Rows, row_key
from service.text import Tokenizer
from service.wire import ErrorInfo, Result

PIECE_PROMPT = (
    "Summarize this part of a longer document in at most {words} words. Keep names and numbers.\n\n{text}"
)
WHOLE_PROMPT = "Summarize the following document in at most {words} words. Keep names and numbers.\n\n{text}"
JOIN_PROMPT = (
    "These are summaries of consecutive parts of one document. "
    "Write one summary of the whole document in at most {words} words.\n\n{text}"
)
PROMPT_VERSION = (PIECE_PROMPT, WHOLE_PROMPT, JOIN_PROMPT)

TOKENS_PER_WORD = 1.6
OUTPUT_MARGIN_TOKENS = 16
TEMPLATE_MARGIN_TOKENS = 8
"""Text and template together may take a few tokens more than each alone."""

FREQUENCY_PENALTY = 0.6
"""Small models repeat themselves when they always take the likeliest token. A repetition penalty would also
penalize the document's own words, which a summary needs."""

RunJob = Callable[[Mapping[str, Any]], Awaitable[Finished]]


@dataclass(frozen=True, slots=True)
class SummarizeOptions:
    max_words: int
    context_tokens: int
    piece_tokens: int
    in_flight: int
    model: str
    """Part of a row's identity; the jobs name `job_model`."""
    job_model: str | None = None

    @property
    def output_tokens(self) -> int:
        return round(self.max_words * TOKENS_PER_WORD) + OUTPUT_MARGIN_TOKENS

    def key_of(self, text: str) -> str:
        parameters = dataclasses.asdict(self)
        del parameters["in_flight"]
        parameters["frequency_penalty"] = FREQUENCY_PENALTY
        return row_key(input=text, prompt=PROMPT_VERSION, model=self.model, parameters=parameters)


@dataclass(slots=True)
class _Totals:
    """The totals of all jobs of one document."""

    num_jobs: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stream_verified: bool = True
    last_job_id: str = ""


class SummarizeRun:
    """One pass over the documents, with at most `in_flight` jobs and as many documents in flight."""

    def __init__(
        self,
        options: SummarizeOptions,
        tokenizer: Tokenizer,
        run_job: RunJob,
        rows: Rows,
        on_row: Callable[[Row], None],
    ) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._run_job = run_job
        self._rows = rows
        self._on_row = on_row
        self._slots = asyncio.Semaphore(options.in_flight)
        self._run_id = secrets.token_hex(4)
        self._template_tokens = self._count_template()
        self.num_failed = 0
        self.num_skipped = 0

    async def run(self, paths: Sequence[Path]) -> None:
        """Summarize the documents, which begin in order; a document that fails is a row.

        Raises DependencyError when a job could not be published.
        """
        open_documents = asyncio.Semaphore(self._options.in_flight)
        try:
            async with asyncio.TaskGroup() as group:
                for path in paths:
                    await open_documents.acquire()
                    group.create_task(self._document(path)).add_done_callback(
                        lambda _: open_documents.release()
                    )
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _document(self, path: Path) -> None:
        started = time.monotonic()
        row: Row = {"path": str(path)}
        totals = _Totals()
        key = row_key(path=str(path))
        try:
            text = await asyncio.to_thread(read_document, path)
            key = self._options.key_of(f"{path}\0{text}")
            row |= {} if key in self._rows.kept else await self._summarize(path, text, key, totals)
        except JobError as error:
            row |= {"status": "failed", "summary": None, "error": dataclasses.asdict(ErrorInfo.of(error))}
        if key in self._rows.kept:
            self.num_skipped += 1
            self._finish(self._rows.kept[key])
            return
        if totals.num_jobs:
            row |= dataclasses.asdict(totals)
        row |= {"key": key, "duration_s": round(time.monotonic() - started, 3)}
        self._rows.append(row)
        self._finish(row)

    async def _summarize(self, path: Path, text: str, key: str, totals: _Totals) -> Row:
        budget = Budget(
            self._options.context_tokens,
            self._template_tokens,
            self._options.output_tokens,
            self._options.piece_tokens,
        )

        async def generate(node: Node) -> str:
            async with self._slots:
                job_id = f"sum-{key[:16]}-{self._run_id}-{node.level}-{node.index}"
                finished = await self._run_job(self._job(node, job_id, path.name[:64]))
            return _take(finished, totals)

        summary = await summarize_text(text, budget, self._count_tokens, generate)
        if not summary.text:
            raise JobError("empty_summary", "the model ended at once: the summary is empty", field="summary")
        return {"status": "completed", "summary": summary.text, "levels": len(summary.levels)}

    def _job(self, node: Node, job_id: str, document: str) -> dict[str, Any]:
        prompt = JOIN_PROMPT if node.level else WHOLE_PROMPT if node.final else PIECE_PROMPT
        words = max(5, min(self._options.max_words, round(node.output_tokens / TOKENS_PER_WORD)))
        job: dict[str, Any] = {
            "id": job_id,
            "messages": [{"role": "user", "content": prompt.format(words=words, text=node.text)}],
            "max_tokens": node.output_tokens,
            "temperature": 0.0,
            "frequency_penalty": FREQUENCY_PENALTY,
            "service_class": "batch",
            "metadata": {"document": document, "level": node.level, "part": node.index},
        }
        return job | ({"model": self._options.job_model} if self._options.job_model else {})

    def _count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode_prompt(text))

    def _count_template(self) -> int:
        prompts = [prompt.format(words=9999, text="") for prompt in PROMPT_VERSION]
        counts = [
            len(self._tokenizer.encode_chat([{"role": "user", "content": prompt}])) for prompt in prompts
        ]
        return max(counts) + TEMPLATE_MARGIN_TOKENS

    def _finish(self, row: Row) -> None:
        self.num_failed += row["status"] != "completed"
        self._on_row(row)


def _take(finished: Finished, totals: _Totals) -> str:
    """Count a job and return its text. Raises JobError when it did not complete or its stream differs."""
    result = finished.result
    totals.num_jobs += 1
    totals.prompt_tokens += result.usage.prompt_tokens
    totals.completion_tokens += result.usage.completion_tokens
    totals.stream_verified &= finished.stream_verified
    totals.last_job_id = result.id
    if result.status != "completed":
        raise _failure(result)
    if not finished.stream_verified:
        raise JobError(
            "stream_differs", f"job {result.id}: the text joined from its stream is not its result's",
            field="stream", job_id=result.id,
        )  # fmt: skip
    return result.choices[0].text


def _failure(result: Result) -> JobError:
    error = result.error
    if error is None:
        return JobError(result.status, f"job {result.id} ended {result.status}", job_id=result.id)
    return JobError(
        error.code, error.message, field=error.field, value=error.value, limit=error.limit, job_id=result.id
    )
