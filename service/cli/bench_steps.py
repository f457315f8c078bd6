"""`tailrace bench decode`, `prefill` and `gpu`: the model's steps and kernels alone, on this thread."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import typer

from kernels.errors import OptionsError
from kernels.runner import Quantization, Runner
from kernels.tools.bench import bench_decode, bench_prefill
from service.cli.console import log_warnings, note, print_json, print_table
from service.engine.build import load
from service.errors import SettingsError
from service.settings import Settings, changed, load_settings

MAX_BATCH = 1_024
MAX_BATCHES = 32
_GPU_PARTS = ("decode", "attention", "prefill", "sampling")
_DECODE_CHUNK_TOKENS = 64
"""Tokens of each step that fills the K/V before steps are timed."""


def decode(batch: str, *, context_tokens: int, quantization: Quantization | None, as_json: bool) -> None:
    """Print the figures of decode steps. Raises SettingsError for sizes outside the limits or too little memory."""
    batches = _batches(batch)
    settings = quantized(load_settings(), quantization)
    # Room for the largest batch, whatever a worker would be given.
    num_slots = max(settings.max_num_seqs, *batches)
    settings = changed(
        settings,
        max_num_seqs=num_slots,
        max_num_batched_tokens=max(settings.max_num_batched_tokens, num_slots, _DECODE_CHUNK_TOKENS),
    )
    runner = _load(settings)
    with _fitting():
        lines = [asdict(figures) for figures in bench_decode(runner, batches, context_tokens=context_tokens)]
    report = _about(settings, runner) | {"decode": [_rounded(line) for line in lines]}
    _show(report, lines, f"decode, {context_tokens} tokens of context", as_json=as_json)


def prefill(prompts: int, *, prompt_tokens: int, quantization: Quantization | None, as_json: bool) -> None:
    """Print the figures of prompt steps. Raises SettingsError when memory does not suffice."""
    settings = quantized(load_settings(), quantization)
    runner = _load(settings)
    chunk_tokens = min(settings.max_num_batched_tokens, prompt_tokens)
    with _fitting():
        figures = bench_prefill(
            runner, num_prompts=prompts, prompt_tokens=prompt_tokens, chunk_tokens=chunk_tokens
        )
    line = asdict(figures)
    _show(_about(settings, runner) | {"prefill": _rounded(line)}, [line], "prefill", as_json=as_json)


def quantized(settings: Settings, quantization: Quantization | None) -> Settings:
    return settings if quantization is None else changed(settings, quantization=quantization)


def _batches(text: str) -> list[int]:
    values = [value.strip() for value in text.split(",")]
    if len(values) > MAX_BATCHES:
        raise SettingsError(f"--batch names {len(values)} sizes; the limit is {MAX_BATCHES}")
    for value in values:
        if not (value.isascii() and value.isdecimal() and len(value) <= 4 and 1 <= int(value) <= MAX_BATCH):
            raise SettingsError(f"--batch: {value!r} is not a number from 1 to {MAX_BATCH}")
    return [int(value) for value in values]


def _load(settings: Settings) -> Runner:
    log_warnings()
    return load(settings)


@contextmanager
def _fitting() -> Iterator[None]:
    """Add to the runner's error which settings make room."""
    try:
        yield
    except OptionsError as error:
        raise SettingsError(f"{error}: raise TAILRACE_KV_CACHE_BYTES or TAILRACE_MAX_MODEL_LEN") from None


def _about(settings: Settings, runner: Runner) -> dict[str, Any]:
    dtype = getattr(runner, "dtype", settings.dtype)  # the deterministic engine has none
    return {
        "model": settings.model if settings.engine == "model" else settings.engine,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": settings.quantization,
    }


def _rounded(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in line.items()}


def _show(report: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    title = f"{report['model']}, {report['dtype']}, quantization {report['quantization']}: {what}"
    rows = [
        [f"{value:.2f}" if isinstance(value, float) else value for value in line.values()] for line in lines
    ]
    print_table([name.replace("_", " ") for name in lines[0]], rows, title=title, right=True)


def gpu(*, as_json: bool) -> None:
    """Measure the GPU's kernels; exit code 1 without a CUDA device or without Triton."""
    log_warnings()
    try:
        from kernels.tools.gpu_bench import run_here

        report: dict[str, Any] = run_here()
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        note("tailrace: bench gpu needs a CUDA device and the package triton, which is not installed here")
        raise typer.Exit(1) from None
    except OptionsError as error:
        note(f"tailrace: {error}")
        raise typer.Exit(1) from None
    if as_json:
        print_json(report)
        return
    print(f"copy {report['copy_bytes_per_s']:.4g} bytes/s, matrix {report['matrix_flops_per_s']:.4g} flop/s")
    rows = [(part, *_gpu_cells(line)) for part in _GPU_PARTS for line in report[part]]
    columns = ("part", "rows", "tokens", "ms", "tokens/s", "of the measured rate")
    print_table(
        columns, rows, title=f"{report['device']}, torch {report['torch']}, {report['dtype']}", right=True
    )
    print_table(
        ("rows", "context", "ms", "device idle", "look-ahead: ms", "device idle", "times as fast"),
        [_gpu_step_cells(line) for line in report["steps"]],
        title="whole steps, one at a time and with look-ahead",
        right=True,
    )


def _gpu_step_cells(line: dict[str, Any]) -> tuple[object, ...]:
    return (
        line["num_rows"],
        line["num_tokens"],
        f"{line['period_s'] * 1e3:.3f}",
        f"{line['idle_share']:.1%}",
        f"{line['lookahead_period_s'] * 1e3:.3f}",
        f"{line['lookahead_idle_share']:.1%}",
        f"{line['speedup']:.3f}",
    )


def _gpu_cells(line: dict[str, Any]) -> tuple[object, ...]:
    share = "–" if line["share"] is None else f"{line['share']:.1%}"
    return (
        line["num_rows"],
        line["num_tokens"],
        f"{line['seconds'] * 1e3:.3f}",
        f"{line['tokens_per_s']:.0f}",
        share,
    )
