"""`tailrace bench`: one workload through the engine alone, or through the whole service."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from kernels.runner import Quantization
from service.cli import baseline
from service.cli.bench_steps import quantized
from service.cli.console import note, print_json, print_table, run
from service.cli.engine_run import run_engine
from service.cli.local import local_service
from service.cli.percentiles import summary
from service.cli.summarize import local_tokenizer
from service.cli.workload import WorkloadRequest, load_workload
from service.client import Client
from service.engine import start_step_thread
from service.errors import DependencyError, SettingsError
from service.settings import Settings, load_settings
from service.wire import Result

POLICIES = ("continuous", "static")


def offline(
    workload: Path, *, policies: str, limit: int | None, slots: int | None, quantization: Quantization | None,
    naive_limit: int | None, as_json: bool,
) -> None:  # fmt: skip
    """`naive_limit` not None: compare with transformers, so many requests one at a time."""
    names = [name.strip() for name in policies.split(",")]
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise SettingsError(f"--policy: {unknown[0]!r} is not one of {', '.join(POLICIES)}")
    settings = quantized(_with_slots(load_settings(), slots), quantization)
    if naive_limit is not None:
        baseline.check_settings(settings)
    report = run(_offline(settings, workload, names, limit))
    if naive_limit is not None:
        requests = load_workload(workload, limit, local_tokenizer(settings))
        report |= baseline.compare(settings, requests, report["runs"], naive_limit)
    _show(report, as_json=as_json)


def service(workload: Path, *, limit: int | None, slots: int | None, as_json: bool) -> None:
    settings = _with_slots(load_settings(), slots)
    report = run(_service(settings, workload, limit))
    _show(report, as_json=as_json)
    if not as_json:
        print(f"service / engine: {report['service_ratio']:.1%} of the output tokens per second")


def _with_slots(settings: Settings, slots: int | None) -> Settings:
    return settings if slots is None else settings.model_copy(update={"max_num_seqs": slots})


async def _offline(
    settings: Settings, workload: Path, policies: Sequence[str], limit: int | None
) -> dict[str, Any]:
    tokenizer = await asyncio.to_thread(local_tokenizer, settings)
    requests = load_workload(workload, limit, tokenizer)
    step_thread, runner = await start_step_thread(settings)
    try:
        runs = {
            policy: await run_engine(settings, step_thread, runner, requests, policy) for policy in policies
        }
    finally:
        await step_thread.stop()
    return {"workload": workload.name, "slots": settings.max_num_seqs, "runs": runs}


async def _service(settings: Settings, workload: Path, limit: int | None) -> dict[str, Any]:
    before = await _offline(settings, workload, [settings.policy], limit)
    tokenizer = await asyncio.to_thread(local_tokenizer, settings)
    requests = load_workload(workload, limit, tokenizer)
    async with local_service(settings) as (local, _), Client(local) as client:
        warm = await client.run(
            _job("warm", WorkloadRequest(requests[0].prompt_token_ids, 2)), verify_stream=False
        )
        _check([warm.result])
        through_service = await _run_service(client, requests)
    # Before and after: what else the machine does meanwhile changes, and the ratio should not.
    after = await _offline(settings, workload, [settings.policy], limit)
    engines = [report["runs"][settings.policy] for report in (before, after)]
    rate = sum(engine["output_tokens_per_s"] for engine in engines) / len(engines)
    return before | {
        "runs": {"engine": engines[0], "service": through_service, "engine_again": engines[1]},
        "service_ratio": round(through_service["output_tokens_per_s"] / rate, 4),
    }


async def _run_service(client: Client, requests: Sequence[WorkloadRequest]) -> dict[str, Any]:
    """Publish everything at once; the time runs from the first publish to the last result."""
    jobs = [_job(f"bench-{time.time_ns()}-{number}", request) for number, request in enumerate(requests)]
    awaited = [client.results.expect(job["id"]) for job in jobs]
    started_s = time.monotonic()
    await asyncio.gather(*(client.publish(job["id"], orjson.dumps(job)) for job in jobs))
    results = await asyncio.gather(*awaited)
    total_s = time.monotonic() - started_s
    _check(results)
    num_tokens = sum(result.usage.completion_tokens for result in results)
    timings = [result.timings for result in results]
    return {
        "output_tokens_per_s": round(num_tokens / total_s, 3),
        "total_s": round(total_s, 3),
        "ttft_s": summary([timing.ttft_s for timing in timings if timing.ttft_s is not None]),
        "tpot_s": summary([timing.tpot_s for timing in timings if timing.tpot_s is not None]),
        "requests": len(results),
        "prompt_tokens": sum(result.usage.prompt_tokens for result in results),
        "output_tokens": num_tokens,
    }


def _job(job_id: str, request: WorkloadRequest) -> dict[str, Any]:
    return {
        "id": job_id,
        "prompt_token_ids": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "service_class": "batch",
    }


def _check(results: Sequence[Result]) -> None:
    for result in results:
        if result.status != "completed":
            reason = result.error.message if result.error else result.status
            raise DependencyError(f"bench job {result.id} did not complete: {reason}")


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    rows = []
    for name, each in report["runs"].items():
        rows.append(
            (
                name, f"{each['output_tokens_per_s']:.1f}", f"{each['total_s']:.2f}", each.get("steps", "–"),
                f"{each['slot_use']:.1%}" if "slot_use" in each else "–",
                *(_milliseconds(each[what][share]) for what in ("ttft_s", "tpot_s") for share in ("p50", "p99")),
            )
        )  # fmt: skip
    columns = (
        "run", "output tok/s", "total s", "steps", "slot use", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99"
    )  # fmt: skip
    print_table(columns, rows, title=f"{report['workload']}, {report['slots']} slots", right=True)
    if "baselines" in report:
        baseline.show(report)
    failed = sum(each.get("failed", 0) for each in report["runs"].values())
    if failed:
        note(f"{failed} requests failed")


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1000:.1f}"
