"""The second half of `bench offline --baseline`: the same requests through transformers, and how we compare."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kernels.weights.source import resolve_model
from service.cli.bench_report import note_spread, spread
from service.cli.console import note, print_table
from service.cli.workload import WorkloadRequest
from service.errors import SettingsError
from service.settings import Settings


def check(settings: Settings, *, num_workloads: int) -> None:
    """Before anything is measured."""
    if settings.engine != "model":
        raise SettingsError("--baseline needs a model; TAILRACE_ENGINE is deterministic")
    if num_workloads > 1:
        raise SettingsError(f"--baseline takes one workload at a time; --shape names {num_workloads}")


def measure(settings: Settings, requests: Sequence[WorkloadRequest], naive_limit: int) -> dict[str, Any]:
    """`baseline_dtype` and `baselines`. Takes minutes and all cores: our engine must have stopped."""
    # Here, because importing transformers takes seconds.
    from kernels.tools.baseline import BaselineOptions, run_baselines_apart

    options = BaselineOptions(
        dtype="bfloat16" if settings.dtype == "auto" else settings.dtype,
        device=settings.device,
        num_threads=settings.num_threads,
        naive_limit=naive_limit,
        max_concurrent=settings.max_num_seqs,
        cpu_batch_tokens=max(settings.max_num_batched_tokens, settings.max_num_seqs),
    )
    outcomes = run_baselines_apart(
        resolve_model(settings.model),
        [(request.prompt_token_ids, request.max_tokens) for request in requests],
        options,
        lambda name: note(f"{name} …"),
    )
    return {
        "baseline_dtype": options.dtype,
        "baselines": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }


def compare(runs: Mapping[str, Any], ours: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """What `measure` gave, and `ratios`: the mean rate of our runs before and after over each baseline's.

    None: the baseline failed. `spread` says how far our two runs lie apart.
    """
    rates = _rates(runs, ours)
    mean = sum(rates) / len(rates)
    baselines = measured["baselines"]
    return {
        **measured,
        "compared_run": ours,
        "spread": spread(rates),
        "ratios": {name: _ratio(mean, each.get("output_tokens_per_s")) for name, each in baselines.items()},
    }


def _rates(runs: Mapping[str, Any], ours: str) -> list[float]:
    return [runs[name]["output_tokens_per_s"] for name in (ours, f"{ours}_again")]


def _ratio(ours: float, theirs: float | None) -> float | None:
    return None if theirs is None else round(ours / theirs, 2)


def show(report: Mapping[str, Any]) -> None:
    ours = report["compared_run"]
    rows = []
    for name, each in report["baselines"].items():
        ratio = report["ratios"][name]
        if ratio is None:
            note(f"{name} failed: {each['error']}")
            continue
        rows.append(
            (
                name,
                f"{each['output_tokens_per_s']:.1f}",
                f"{each['total_s']:.2f}",
                each["requests"],
                f"{ratio:.1f}×",
            )
        )
    columns = ("baseline", "output tok/s", "total s", "requests", f"{ours} against it")
    print_table(columns, rows, title=f"transformers, {report['baseline_dtype']}", right=True)
    note_spread(ours, _rates(report["runs"], ours))
