"""`tailrace bench offline`: workloads through the engine alone, and beside transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.runner import Quantization
from service.cli import baseline
from service.cli.bench_report import show
from service.cli.bench_steps import quantized
from service.cli.console import note, print_json, run
from service.cli.engine_run import run_engine
from service.cli.shapes import Shape, parse_shapes, shape_requests
from service.cli.summarize import local_tokenizer
from service.cli.workload import WorkloadRequest, load_workload
from service.engine import start_step_thread
from service.errors import SettingsError
from service.settings import Settings, load_settings
from service.text import Tokenizer

POLICIES = ("continuous", "static")

Workloads = Mapping[str, Sequence[WorkloadRequest]]
"""By name: the file's, or the shape's."""


def chosen(workload: Path | None, shapes: str | None) -> list[Path | Shape]:
    """What to run, by file or by shape; one of the two."""
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
    """`naive_limit` not None: compare with transformers, so many requests one at a time."""
    names = [name.strip() for name in policies.split(",")]
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise SettingsError(f"--policy: {unknown[0]!r} is not one of {', '.join(POLICIES)}")
    settings = quantized(with_slots(load_settings(), slots), quantization)
    if naive_limit is not None:
        baseline.check(settings, num_workloads=len(sources))
    workloads = _load(sources, limit, local_tokenizer(settings))
    report: dict[str, Any] = {
        "workload": ", ".join(workloads),
        "slots": settings.max_num_seqs,
        "runs": run(run_offline(settings, workloads, names)),
    }
    if naive_limit is not None:
        requests = next(iter(workloads.values()))
        baselines = baseline.measure(settings, requests, naive_limit)
        note(f"{names[0]} again …")
        # Before and after: a machine that is busy with something else for a while shows in the difference.
        after = run(run_offline(settings, workloads, names[:1]))
        report["runs"] |= {f"{names[0]}_again": after[names[0]]}
        report |= baseline.compare(report["runs"], names[0], baselines)
    if as_json:
        print_json(report)
        return
    show(report)
    if "baselines" in report:
        baseline.show(report)


def with_slots(settings: Settings, slots: int | None) -> Settings:
    return settings if slots is None else settings.model_copy(update={"max_num_seqs": slots})


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
    """Each workload under each policy, over one loaded model; runs are named by what sets them apart."""
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
