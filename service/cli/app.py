"""Commands and their options. Each body imports what it runs, so that `tailrace --help` stays quick."""

import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from service.cli.bench_commands import bench

app = typer.Typer(
    name="tailrace",
    help="Event-driven LLM inference: jobs arrive on Kafka, tokens stream out through Redis.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
dlq = typer.Typer(help="Dead letters: records that could not be run.", no_args_is_help=True)
app.add_typer(dlq, name="dlq")
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="JSON for programs.")]
JobId = Annotated[
    str, typer.Argument(help="The job's id, or the custom_id of a batch line.", show_default=False)
]


class ServiceClass(StrEnum):
    interactive = "interactive"
    standard = "standard"
    batch = "batch"


@app.command()
def serve(
    embedded: Annotated[bool, typer.Option(help="Start a Kafka broker and a Redis too, in memory.")] = False,
) -> None:
    """Run a worker until SIGTERM or Ctrl-C; settings come from TAILRACE_*."""
    # Loading takes a moment: a SIGTERM before there is anything to stop is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from service.cli import serve as command

    command.serve(embedded=embedded)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; `-` reads standard input.", show_default=False)],
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the text as it is, without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    model: Annotated[str | None, typer.Option(help="A served model's name.")] = None,
    service_class: Annotated[
        ServiceClass, typer.Option("--class", help="Urgency.")
    ] = ServiceClass.interactive,
    job_id: Annotated[str | None, typer.Option("--id", help="The job's id; default: a random one.")] = None,
    as_json: Json = False,
) -> None:
    """Publish one job and print its tokens as they come. Ctrl-C cancels it."""
    from service.cli import generate as command

    command.generate(
        command.make_job(
            prompt, system=system, raw=raw, max_tokens=max_tokens, temperature=temperature, seed=seed,
            stop=stop or [], model=model, service_class=service_class.value, job_id=job_id,
        ),
        as_json=as_json,
    )  # fmt: skip


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="Jobs or OpenAI Batch lines; `-`: standard input.")],
    wait: Annotated[bool, typer.Option(help="Collect the results.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Results, one JSON line each.")
    ] = None,
    in_flight: Annotated[int, typer.Option(min=1, max=10_000, help="Jobs waited for at once.")] = 256,
    retry_failed: Annotated[bool, typer.Option(help="Run failed rows of an earlier output again.")] = False,
) -> None:
    """Publish a file of jobs. With --wait -o OUT results are appended as they come; a second run resumes."""
    from service.cli import submit as command

    command.submit(file, wait=wait, output=output, in_flight=in_flight, retry_failed=retry_failed)


@app.command()
def tail(job_id: JobId, as_json: Json = False) -> None:
    """Follow a job's stream from its first token on, even when it has begun long ago."""
    from service.cli import generate as command

    command.tail(job_id, as_json=as_json)


@app.command()
def cancel(
    job_id: JobId,
    wait: Annotated[bool, typer.Option(help="Wait until the job has ended.")] = False,
) -> None:
    """Cancel a job in any state."""
    from service.cli import generate as command

    command.cancel(job_id, wait=wait)


@app.command()
def summarize(
    paths: Annotated[list[Path], typer.Argument(help="Text files or folders of them.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="JSON lines; default: stdout.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Summarize only so many documents, the first ones.")
    ] = None,
    max_words: Annotated[int, typer.Option(min=5, max=2_000, help="Length of a summary.")] = 80,
    context: Annotated[int | None, typer.Option(min=256, help="Tokens of prompt and output.")] = None,
    piece_tokens: Annotated[int, typer.Option(min=64, help="Largest piece of a long document.")] = 1_024,
    in_flight: Annotated[int, typer.Option(min=1, max=1_024, help="Jobs at once.")] = 32,
    model: Annotated[str | None, typer.Option(help="A served model's name.")] = None,
    retry_failed: Annotated[
        bool, typer.Option(help="Run failed documents of an earlier output again.")
    ] = False,
) -> None:
    """Summarize documents of any length; a second run with the same output resumes."""
    from service.cli import summarize as command

    command.summarize(
        paths, output=output, limit=limit, max_words=max_words, context=context, piece_tokens=piece_tokens,
        in_flight=in_flight, model=model, retry_failed=retry_failed,
    )  # fmt: skip


class Example(StrEnum):
    varied = "varied"
    even = "even"


@app.command()
def lab(
    example: Annotated[Example | None, typer.Option(help="Eight requests of varied or even length.")] = None,
    requests: Annotated[str | None, typer.Option(help="Output lengths, such as 8,2,2.")] = None,
    slots: Annotated[int, typer.Option(min=1, max=64, help="Slots of the batch.")] = 4,
    as_json: Json = False,
) -> None:
    """Compare static and continuous batching in the real scheduler: rows are slots, columns iterations."""
    from service.cli import lab as command

    command.lab(example=example.value if example else None, requests=requests, slots=slots, as_json=as_json)


@app.command()
def config(as_json: Json = False) -> None:
    """Show the effective settings, secrets masked."""
    from service.cli import doctor as command

    command.show_settings(as_json=as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check device, kernels, model, Kafka and Redis, and say what to do."""
    from service.cli import doctor as command

    command.doctor(as_json=as_json)


@app.command(hidden=True)
def demo() -> None:
    """Summarize sample documents through the whole path, as `ops/demo` does."""
    from service.cli import demo as command

    command.demo()


@dlq.command("list")
def dlq_list(
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="At most so many letters, oldest first.")
    ] = 1_000,
    as_json: Json = False,
) -> None:
    """List dead letters: where each came from and why."""
    from service.cli import dlq as command

    command.list_letters(limit=limit, as_json=as_json)


@dlq.command("replay")
def dlq_replay(
    places: Annotated[
        list[str] | None, typer.Argument(help="PARTITION:OFFSET as `dlq list` shows them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Publish dead letters again, byte for byte, on the jobs topic."""
    from service.cli import dlq as command

    command.replay(places or [], everything=everything)
