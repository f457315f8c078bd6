"""`tailrace bench offline`: runs workloads through the engine alone, and the same requests through transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernels.runner import Quantization
from kernels.weights.source import resolve_model
from service.cli.bench_report import note_spread, show, spread
from service.cli.bench_steps import quantized
from service.cli.console import note, print_json, print_table, run
from service.cli.engine_run import run_engine
from service.cli.summarize import local_tokenizer
from service.cli.workload import Shape, WorkloadRequest, load_workload, parse_shapes, shape_requests
from service.engine import start_step_thread
from service.errors import SettingsError
from service.settings import Settings, changed, load_settings
from service.text import Tokenizer

POLICIES = ("continuous", "static")

Workloads = Mapping[str, Sequence[WorkloadRequest]]
"""Requests by the name of their file or shape."""


def chosen(workload: Path | None, shapes: str | None) -> list[Path | Shape]:
    """Return what to run, by file or by shape. Raises SettingsError unless exactly one of the two is given."""
    if workload is not None and shapes is not None:
        raise SettingsError("--workload and --shape are two ways to say the same; give one")
    if workload is not None:
        return [workload]
    if shapes is not None:
        return [*parse_shapes(shapes)]
    raise SettingsError("give --workload FILE, or --shape such as 1024:16:16, or --shape typical")


def offline(
    sources: Sequence[Path | Shape], *, policies: str, limit: int | None, slots: int | None,
    quantization: Quantization | None, naive_limit: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Print the figures of each workload under each policy.

    With `naive_limit` also compare with transformers, which generates so many requests one at a time. Raises
    SettingsError for an unknown policy, and for a request that can never fit.
    """
    names = [name.strip() for name in policies.split(",")]
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise SettingsError(f"--policy: {unknown[0]!r} is not one of {', '.join(POLICIES)}")
    settings = quantized(with_slots(load_settings(), slots), quantization)
    if naive_limit is not None:
        check_baseline(settings, num_workloads=len(sources))
    workloads = _load(sources, limit, local_tokenizer(settings))
    report: dict[str, Any] = {
        "workload": ", ".join(workloads),
        "slots": settings.max_num_seqs,
        "runs": run(run_offline(settings, workloads, names)),
    }
    if naive_limit is not None:
        requests = next(iter(workloads.values()))
        baselines = measure_baseline(settings, requests, naive_limit)
        note(f"{names[0]} again …")
        # Our engine runs before and after, so that their difference shows a machine that was busy meanwhile.
        after = run(run_offline(settings, workloads, names[:1]))
        report["runs"] |= {f"{names[0]}_again": after[names[0]]}
        report |= compare_baseline(report["runs"], names[0], baselines)
    if as_json:
        print_json(report)
        return
    show(report)
    if "baselines" in report:
        show_baseline(report)


def with_slots(settings: Settings, slots: int | None) -> Settings:
    """Return the settings with so many slots and a token budget of at least one token for each."""
    if slots is None:
        return settings
    # The settings refuse more slots than tokens; who asks a benchmark for slots only has the budget follow.
    budget = max(settings.max_num_batched_tokens, slots)
    return changed(settings, max_num_seqs=slots, max_num_batched_tokens=budget)


def _load(sources: Sequence[Path | Shape], limit: int | None, tokenizer: Tokenizer) -> Workloads:
    return {
        each.name: shape_requests(each, limit, tokenizer)
        if isinstance(each, Shape)
        else load_workload(each, limit, tokenizer)
        for each in sources
    }


async def run_offline(
    settings: Settings, workloads: Workloads, policies: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Run each workload under each policy over one loaded model; a run is named by what differs between runs."""
    step_thread, runner = await start_step_thread(settings)
    runs = {}
    try:
        for name, requests in workloads.items():
            for policy in policies:
                run_name = policy if len(workloads) == 1 else name
                if len(workloads) > 1 and len(policies) > 1:
                    run_name = f"{name} {policy}"
                runs[run_name] = await run_engine(settings, step_thread, runner, requests, policy)
    finally:
        await step_thread.stop()
    return runs


def check_baseline(settings: Settings, *, num_workloads: int) -> None:
    """Refuse, before anything is measured, what cannot be compared. Raises SettingsError."""
    if settings.engine != "model":
        raise SettingsError("--baseline needs a model; TAILRACE_ENGINE is deterministic")
    if num_workloads > 1:
        raise SettingsError(f"--baseline takes one workload at a time; --shape names {num_workloads}")


def measure_baseline(
    settings: Settings, requests: Sequence[WorkloadRequest], naive_limit: int
) -> dict[str, Any]:
    """Run the requests through transformers and return `baseline_dtype` and `baselines`.

    Takes minutes and all cores: our engine must have stopped.
    """
    # Here, because importing transformers takes seconds.
    from kernels.tools.baseline import BaselineOptions, run_baselines_apart

    options = BaselineOptions(
        dtype="bfloat16" if settings.dtype == "auto" else settings.dtype,
        device=settings.device,
        num_threads=settings.num_threads,
        naive_limit=naive_limit,
        max_concurrent=settings.max_num_seqs,
        cpu_batch_tokens=settings.max_num_batched_tokens,
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


def compare_baseline(runs: Mapping[str, Any], ours: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Add `ratios` to what `measure_baseline` gave: the mean rate of our two runs over each baseline's.

    A ratio is None when the baseline failed. `spread` is the spread between our two runs, before and after.
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


def show_baseline(report: Mapping[str, Any]) -> None:
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
