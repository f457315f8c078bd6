"""`tailrace summarize`."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import typer

from service.cli.console import Progress, note, run
from service.cli.submit import StdoutRows
from service.client import Client, client_settings
from service.pipelines.documents import find_documents
from service.pipelines.rows import Row, RowFile
from service.pipelines.summarize import SummarizeOptions, SummarizeRun
from service.settings import Settings
from service.text import Tokenizer, load_tokenizer

DEFAULT_CONTEXT_TOKENS = 2_048


def summarize(
    paths: list[Path], *, output: Path | None, limit: int | None, max_words: int, context: int | None,
    piece_tokens: int, in_flight: int, model: str | None, retry_failed: bool,
) -> None:  # fmt: skip
    """Summarize documents; exit code 1 when one fails. Raises SettingsError and DependencyError."""
    settings = client_settings()
    documents = find_documents(paths, limit)
    options = SummarizeOptions(
        max_words=max_words,
        context_tokens=context
        or min(settings.max_model_len or DEFAULT_CONTEXT_TOKENS, DEFAULT_CONTEXT_TOKENS),
        piece_tokens=piece_tokens,
        in_flight=in_flight,
        model=model or settings.served_model_name or settings.model,
        job_model=model,
    )
    redo = (lambda row: row.get("status") != "completed") if retry_failed else (lambda _row: False)
    with ExitStack() as stack:
        rows = stack.enter_context(RowFile(output, redo=redo)) if output else StdoutRows()
        good = run(_summarize(settings, documents, options, rows))
    if not good:
        raise typer.Exit(1)


async def _summarize(
    settings: Settings, documents: list[Path], options: SummarizeOptions, rows: RowFile | StdoutRows
) -> bool:
    tokenizer = await asyncio.to_thread(local_tokenizer, settings)
    async with Client(settings) as client:
        with Progress("documents", len(documents)) as progress:

            def on_row(row: Row) -> None:
                progress.advance()
                if row["status"] != "completed":
                    note(f"{row['path']}: {row['error']['message']}")

            batch = SummarizeRun(options, tokenizer, client.run, rows, on_row)
            try:
                await batch.run(documents)
            except asyncio.CancelledError:
                note("interrupted: the same command goes on where this one stopped")
                raise
    skipped = f" ({batch.num_skipped} of them in an earlier run)" if batch.num_skipped else ""
    note(f"{len(documents) - batch.num_failed} summaries, {batch.num_failed} failed{skipped}")
    return not batch.num_failed


def local_tokenizer(settings: Settings) -> Tokenizer:
    """Load the served model's tokenizer from this machine's files. Raises KernelsError or SettingsError."""
    if settings.engine == "deterministic":
        return load_tokenizer(None)
    from kernels.weights.source import resolve_model

    return load_tokenizer(resolve_model(settings.model).path)
