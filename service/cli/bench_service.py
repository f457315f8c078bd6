"""`tailrace bench service`: runs a workload through Kafka, worker and Redis, and through the engine alone."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from service.cli.bench_offline import run_offline, with_slots
from service.cli.bench_report import note_spread, show, spread, summary
from service.cli.console import note, print_json, print_table, run
from service.cli.serve import local_service
from service.cli.summarize import local_tokenizer
from service.cli.workload import WorkloadRequest, load_workload
from service.client import Client
from service.errors import DependencyError
from service.settings import Settings, load_settings
from service.wire import Result

STREAMED, UNSTREAMED = "streamed", "results only"


def service(workload: Path, *, limit: int | None, slots: int | None, as_json: bool) -> None:
    """Run the workload once through the service, between two runs of the engine alone."""
    settings = with_slots(load_settings(), slots)
    report = run(_service(settings, workload, limit))
    if as_json:
        print_json(report)
        return
    show(report)
    print(f"service / engine: {report['service_ratio']:.1%} of the output tokens per second")
    engines = [report["runs"][name]["output_tokens_per_s"] for name in ("engine", "engine_again")]
    note_spread("the engine", engines)


def streaming(workload: Path, *, repeats: int, limit: int | None, slots: int | None, as_json: bool) -> None:
    """Run the same jobs with and without token streams, in turns, `repeats` times each."""
    settings = with_slots(load_settings(), slots)
    report = run(_streaming(settings, workload, limit, repeats))
    if as_json:
        print_json(report)
        return
    rows = [
        (
            name,
            f"{statistics.median(rates):.1f}",
            f"{statistics.median(report['loop_cpu_s'][name]):.2f}",
            ", ".join(f"{rate:.1f}" for rate in rates),
        )
        for name, rates in report["output_tokens_per_s"].items()
    ]
    title = f"{report['workload']}, {report['requests']} jobs, {report['slots']} slots"
    columns = ("jobs", "median output tok/s", "event loop's CPU s", "tok/s of each run")
    print_table(columns, rows, title=title, right=True)
    print(f"streaming costs {report['cost']:.1%} of the output tokens per second")
    note_spread("jobs without streams", report["output_tokens_per_s"][UNSTREAMED])


async def _service(settings: Settings, workload: Path, limit: int | None) -> dict[str, Any]:
    requests = await _requests(settings, workload, limit)
    workloads, policies = {workload.name: requests}, [settings.policy]
    before = await run_offline(settings, workloads, policies)
    async with local_service(settings) as (local, _), Client(local) as client:
        await _warm_up(client, requests)
        through_service = await _run_service(client, requests)
    # The engine runs before and after, so that other load on the machine changes the ratio less.
    after = await run_offline(settings, workloads, policies)
    engines = [runs[settings.policy] for runs in (before, after)]
    rates = [engine["output_tokens_per_s"] for engine in engines]
    return {
        "workload": workload.name,
        "slots": settings.max_num_seqs,
        "runs": {"engine": engines[0], "service": through_service, "engine_again": engines[1]},
        "service_ratio": round(through_service["output_tokens_per_s"] / statistics.fmean(rates), 4),
        "spread": spread(rates),
    }


async def _streaming(settings: Settings, workload: Path, limit: int | None, repeats: int) -> dict[str, Any]:
    requests = await _requests(settings, workload, limit)
    rates: dict[str, list[float]] = {STREAMED: [], UNSTREAMED: []}
    loop_cpu_s: dict[str, list[float]] = {STREAMED: [], UNSTREAMED: []}
    async with local_service(settings) as (local, _), Client(local) as client:
        await _warm_up(client, requests)
        for repeat in range(repeats):
            # The order alternates, so that a machine that slows down favours neither.
            for name in (STREAMED, UNSTREAMED) if repeat % 2 else (UNSTREAMED, STREAMED):
                figures = await _run_service(client, requests, stream=name == STREAMED)
                rates[name].append(figures["output_tokens_per_s"])
                loop_cpu_s[name].append(figures["loop_cpu_s"])
                note(f"{repeat + 1} of {repeats}, {name}: {rates[name][-1]:.1f} tok/s")
    medians = {name: statistics.median(each) for name, each in rates.items()}
    pairs = [with_stream / without for with_stream, without in zip(*rates.values(), strict=True)]
    return {
        "workload": workload.name,
        "slots": settings.max_num_seqs,
        "requests": len(requests),
        "output_tokens_per_s": rates,
        "loop_cpu_s": loop_cpu_s,
        "cost": round(1 - medians[STREAMED] / medians[UNSTREAMED], 4),
        "cost_of_pairs": [round(1 - pair, 4) for pair in pairs],
        "spread": spread(rates[UNSTREAMED]),
    }


async def _requests(settings: Settings, workload: Path, limit: int | None) -> list[WorkloadRequest]:
    tokenizer = await asyncio.to_thread(local_tokenizer, settings)
    return load_workload(workload, limit, tokenizer)


async def _warm_up(client: Client, requests: Sequence[WorkloadRequest]) -> None:
    job = _job("warm", WorkloadRequest(requests[0].prompt_token_ids, 2), tenant="warm", stream=True)
    warm = await client.run(job, verify_stream=False)
    _check([warm.result])


async def _run_service(
    client: Client, requests: Sequence[WorkloadRequest], *, stream: bool = True
) -> dict[str, Any]:
    """Publish everything at once; the time runs from the first publish to the last result.

    `loop_cpu_s` is the processor time of worker and client together on the event loop's thread.
    """
    name = f"bench-{time.time_ns()}"
    jobs = [
        _job(f"{name}-{number}", request, tenant=name, stream=stream)
        for number, request in enumerate(requests)
    ]
    awaited = [client.expect(job["id"]) for job in jobs]
    started_s, started_cpu_s = time.monotonic(), time.thread_time()
    await asyncio.gather(*(client.publish(job["id"], orjson.dumps(job)) for job in jobs))
    results = await asyncio.gather(*awaited)
    total_s, loop_cpu_s = time.monotonic() - started_s, time.thread_time() - started_cpu_s
    _check(results)
    num_prompt_tokens = sum(result.usage.prompt_tokens for result in results)
    num_tokens = sum(result.usage.completion_tokens for result in results)
    timings = [result.timings for result in results]
    return {
        "prompt_tokens_per_s": round(num_prompt_tokens / total_s, 3),
        "output_tokens_per_s": round(num_tokens / total_s, 3),
        "total_s": round(total_s, 3),
        "loop_cpu_s": round(loop_cpu_s, 3),
        "ttft_s": summary([timing.ttft_s for timing in timings if timing.ttft_s is not None]),
        "tpot_s": summary([timing.tpot_s for timing in timings if timing.tpot_s is not None]),
        "requests": len(results),
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_tokens,
    }


def _job(job_id: str, request: WorkloadRequest, *, tenant: str, stream: bool) -> dict[str, Any]:
    """`tenant` keeps a run from finding the prompts of an earlier one in the prefix cache."""
    return {
        "id": job_id,
        "prompt_token_ids": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "service_class": "batch",
        "tenant": tenant,
        "stream": stream,
    }


def _check(results: Sequence[Result]) -> None:
    for result in results:
        if result.status != "completed":
            reason = result.error.message if result.error else result.status
            raise DependencyError(f"bench job {result.id} did not complete: {reason}")
