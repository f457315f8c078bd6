"""The demo: runs documents through Kafka, scheduler, step thread and Redis, and prints a report."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from service.cli.bench_report import percentile
from service.cli.console import note, print_table, run
from service.cli.demo_screen import Screen, make_screen
from service.cli.serve import local_service
from service.cli.summarize import DEFAULT_CONTEXT_TOKENS, local_tokenizer
from service.cli.workload import SAMPLES
from service.client import Client, Finished
from service.pipelines.documents import find_documents
from service.pipelines.rows import Row
from service.pipelines.summarize import SummarizeOptions, SummarizeRun
from service.settings import Settings, changed, load_settings
from service.stream.reader import Item
from service.wire import Delta, Result
from service.worker.worker import Worker

MAX_WORDS = 60
PIECE_TOKENS = 900
DEMO_SLOTS = 16


class MemoryRows:
    """Keeps rows in memory: nothing is written to disk."""

    def __init__(self) -> None:
        self.kept: dict[str, Row] = {}
        self.rows: list[Row] = []

    def append(self, row: Row) -> None:
        self.rows.append(row)


def demo() -> None:
    """Run the demo; exit code 1 when a document has no summary."""
    settings = load_settings()
    if "max_num_seqs" not in settings.model_fields_set:
        settings = changed(settings, max_num_seqs=DEMO_SLOTS)
    if not run(Demo(settings).run()):
        raise typer.Exit(1)


class Demo:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._rows = MemoryRows()
        self._results: list[Result] = []
        self._documents = find_documents([SAMPLES], None)
        self._client: Client | None = None
        self._screen: Screen | None = None
        self._started_s = time.monotonic()
        self._first_token_s: float | None = None

    async def run(self) -> bool:
        """Run the demo; return True when every document has its summary."""
        note("starting Kafka and Redis (embedded, in memory) and a worker; loading the model …")
        async with local_service(self._settings) as (settings, worker), Client(settings) as client:
            self._client = client
            note(
                f"ready after {time.monotonic() - self._started_s:.1f} s: Kafka {settings.kafka_bootstrap}, "
                f"Redis {settings.redis_url}; {len(self._documents)} documents go in"
            )
            began_s = time.monotonic()
            with make_screen(len(self._documents)) as self._screen:
                await self._summarize(settings)
            self._report(worker, time.monotonic() - began_s)
        return all(row["status"] == "completed" for row in self._rows.rows)

    async def _summarize(self, settings: Settings) -> None:
        options = SummarizeOptions(
            max_words=MAX_WORDS,
            context_tokens=DEFAULT_CONTEXT_TOKENS,
            piece_tokens=PIECE_TOKENS,
            in_flight=settings.max_num_seqs,
            model=settings.model,
        )
        batch = SummarizeRun(options, local_tokenizer(settings), self._run_job, self._rows, self._on_row)
        await batch.run(self._documents)

    async def _run_job(self, job: Mapping[str, Any]) -> Finished:
        assert self._client is not None
        metadata = job["metadata"]
        label = f"{metadata['document']} {metadata['level']}.{metadata['part']}"

        def on_item(item: Item) -> None:
            if isinstance(item, Delta):
                if self._first_token_s is None:
                    self._first_token_s = time.monotonic() - self._started_s
                self._shown.text(label, item.text)

        finished = await self._client.run(job, on_item=on_item)
        self._shown.ended(label)
        self._results.append(finished.result)
        return finished

    @property
    def _shown(self) -> Screen:
        assert self._screen is not None
        return self._screen

    def _on_row(self, row: Row) -> None:
        name = Path(row["path"]).name
        self._shown.document(name, row["summary"] or row["error"]["message"])

    def _report(self, worker: Worker, took_s: float) -> None:
        tokens = sum(result.usage.completion_tokens for result in self._results)
        prompt_tokens = sum(result.usage.prompt_tokens for result in self._results)
        verified = sum(bool(row.get("stream_verified")) for row in self._rows.rows)
        completed = sum(row["status"] == "completed" for row in self._rows.rows)
        timings = [result.timings for result in self._results]
        ttft = [timing.ttft_s for timing in timings if timing.ttft_s is not None]
        tpot = [timing.tpot_s for timing in timings if timing.tpot_s is not None]
        print_table(
            ("report", "value"),
            [
                (
                    "documents",
                    f"{completed} of {len(self._documents)} summarized, {verified} streams proven whole",
                ),
                ("jobs", len(self._results)),
                ("prompt tokens", prompt_tokens),
                ("output tokens", tokens),
                ("output tokens/s", f"{tokens / took_s:.1f}"),
                ("TTFT p50 / p99", _pair(ttft, 1.0, "s")),
                ("TPOT p50 / p99", _pair(tpot, 1_000.0, "ms")),
                (
                    "slot use",
                    f"{_slot_use(worker, self._settings.max_num_seqs):.1%} of {self._settings.max_num_seqs}",
                ),
                ("first token after", f"{self._first_token_s or 0.0:.1f} s"),
            ],
        )
        sys.stdout.flush()


def _pair(values: list[float], scale: float, unit: str) -> str:
    if not values:
        return "–"
    middle, high = percentile(values, 0.5) or 0.0, percentile(values, 0.99) or 0.0
    return f"{middle * scale:.2f} / {high * scale:.2f} {unit}"


def _slot_use(worker: Worker, num_slots: int) -> float:
    """Return the mean number of rows of a step over the number of slots."""
    registry = worker.metrics.registry
    rows = registry.get_sample_value("tailrace_batch_requests_sum") or 0.0
    steps = registry.get_sample_value("tailrace_batch_requests_count") or 0.0
    return rows / (steps * num_slots) if steps else 0.0
