"""`tailrace bench` and its options. As in `app`, each body imports what it runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

bench = typer.Typer(help="Throughput and latency, measured.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="JSON for programs.")]
_WORKLOAD_HELP = 'JSON list of {"prompt_tokens", "max_tokens"}.'
Workload = Annotated[Path, typer.Option(help=_WORKLOAD_HELP)]
Limit = Annotated[int | None, typer.Option(min=1, help="Run only so many requests, the first ones.")]
Slots = Annotated[int | None, typer.Option(min=1, max=1_024, help="Default: TAILRACE_MAX_NUM_SEQS.")]
Quantized = Annotated[
    Literal["none", "int8"] | None, typer.Option("--quantization", help="Default: TAILRACE_QUANTIZATION.")
]


@bench.command("offline")
def bench_offline(
    workload: Annotated[Path | None, typer.Option(help=_WORKLOAD_HELP)] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Instead of a file: PROMPT_TOKENS:OUTPUT_TOKENS:REQUESTS or long-prompts, long-answers, lone-stream, "
            "short-jobs, separated by commas; typical: these four."
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="continuous, static or both: continuous,static.")
    ] = "continuous",
    limit: Limit = None,
    slots: Slots = None,
    quantization: Quantized = None,
    baseline: Annotated[
        Literal["transformers"] | None,
        typer.Option(help="Then run the same requests through it, which takes minutes."),
    ] = None,
    baseline_limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="Requests that the baseline generates one at a time.")
    ] = 16,
    as_json: Json = False,
) -> None:
    """Run all requests of a workload at once through the engine, without Kafka and Redis."""
    from service.cli import bench_offline as command

    command.offline(
        command.chosen(workload, shape), policies=policy, limit=limit, slots=slots, quantization=quantization,
        naive_limit=baseline_limit if baseline else None, as_json=as_json,
    )  # fmt: skip


@bench.command("service")
def bench_service(
    workload: Workload,
    limit: Limit = None,
    slots: Slots = None,
    compare_streaming: Annotated[
        bool, typer.Option(help="Instead run the jobs with and without token streams, in turns.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, max=100, help="Runs of each kind with --compare-streaming.")
    ] = 5,
    as_json: Json = False,
) -> None:
    """Run the same workload through Kafka and Redis and through the engine alone; print the ratio of both."""
    from service.cli import bench_service as command

    if compare_streaming:
        command.streaming(workload, repeats=repeats, limit=limit, slots=slots, as_json=as_json)
    else:
        command.service(workload, limit=limit, slots=slots, as_json=as_json)


@bench.command("decode")
def bench_decode(
    batch: Annotated[str, typer.Option(help="Requests per step, such as 1,8,32,64.")] = "1,8,32,64",
    context: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens that each attends to.")] = 150,
    quantization: Quantized = None,
    as_json: Json = False,
) -> None:
    """Time steps in which each request gets one more token: ms and tokens/s by batch size, the model alone."""
    from service.cli import bench_steps as command

    command.decode(batch, context_tokens=context, quantization=quantization, as_json=as_json)


@bench.command("prefill")
def bench_prefill(
    prompts: Annotated[
        int, typer.Option(min=1, max=1_024, help="Prompts, computed one after the other.")
    ] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of each prompt.")] = 1_024,
    quantization: Quantized = None,
    as_json: Json = False,
) -> None:
    """Time prompts in steps of TAILRACE_MAX_NUM_BATCHED_TOKENS: ms per step and tokens/s, the model alone."""
    from service.cli import bench_steps as command

    command.prefill(prompts, prompt_tokens=prompt_tokens, quantization=quantization, as_json=as_json)


@bench.command("perplexity")
def bench_perplexity(
    paths: Annotated[list[Path], typer.Argument(help="Text files or folders of them.", show_default=False)],
    quantization: Annotated[
        str | None, typer.Option(help="One or both: none,int8. Default: TAILRACE_QUANTIZATION.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="One or more, such as float32,bfloat16. Default: TAILRACE_DTYPE.")
    ] = None,
    window: Annotated[
        int, typer.Option(min=2, max=1 << 17, help="Tokens that the model reads together.")
    ] = 1_024,
    max_tokens: Annotated[int, typer.Option(min=1, max=10_000_000, help="Tokens to predict.")] = 20_000,
    as_json: Json = False,
) -> None:
    """Measure how well the model predicts documents, and each run's ratio to the first: what int8 costs in accuracy."""
    from service.cli import bench_perplexity as command

    command.perplexity(
        paths, quantizations=quantization, dtypes=dtype, window=window, max_tokens=max_tokens, as_json=as_json
    )


@bench.command("gpu")
def bench_gpu(as_json: Json = False) -> None:
    """Measure what the GPU can do and how much of it the kernels reach, with an 8B model of random weights."""
    from service.cli import bench_steps as command

    command.gpu(as_json=as_json)
