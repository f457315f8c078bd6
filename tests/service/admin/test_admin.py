"""Health, readiness and metrics over HTTP."""

import asyncio
import time

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from service.admin import AdminServer, watch_loop_lag
from service.metrics import LATENCY_BUCKETS_S, STEP_BUCKETS_S, Metrics


async def _get(server: AdminServer, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{server.port}{path}") as answer,
    ):
        return answer.status, await answer.text()


async def test_probes_answer_503_with_reasons() -> None:
    reasons: dict[str, str] = {}
    metrics = Metrics()
    async with AdminServer(
        "127.0.0.1", 0, registry=metrics.registry, health=dict, ready=lambda: reasons
    ) as server:
        assert await _get(server, "/healthz") == (200, '{"ok":true,"reasons":{}}')
        assert await _get(server, "/readyz") == (200, '{"ok":true,"reasons":{}}')
        reasons["kafka"] = "no broker answers"
        assert await _get(server, "/readyz") == (503, '{"ok":false,"reasons":{"kafka":"no broker answers"}}')
        assert (await _get(server, "/healthz"))[0] == 200


async def test_metrics_are_exposed_in_base_units() -> None:
    metrics = Metrics()
    metrics.jobs.labels(status="completed").inc()
    metrics.ttft.labels(service_class="standard").observe(0.25)
    async with AdminServer("127.0.0.1", 0, registry=metrics.registry, health=dict, ready=dict) as server:
        status, text = await _get(server, "/metrics")
    assert status == 200
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["tailrace_jobs_total", (("status", "completed"),)] == 1
    assert samples["tailrace_ttft_seconds_sum", (("service_class", "standard"),)] == 0.25
    assert ("process_resident_memory_bytes", ()) in samples


def test_no_label_grows_with_jobs_or_tenants() -> None:
    allowed = {"status", "state", "service_class", "dependency", "le"}
    families = list(Metrics(process=False).registry.collect())
    assert len(families) > 25
    for metric in vars(Metrics(process=False)).values():
        assert set(getattr(metric, "_labelnames", ())) <= allowed


def test_buckets_begin_at_one_millisecond_and_grow() -> None:
    for buckets in (STEP_BUCKETS_S, LATENCY_BUCKETS_S):
        assert buckets[0] == 0.001
        assert list(buckets) == sorted(set(buckets))


async def test_loop_lag_sees_a_blocked_loop() -> None:
    measured: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    watch = asyncio.create_task(watch_loop_lag(measured.set_result, interval_s=0.001))
    await asyncio.sleep(0)
    block_loop = time.sleep
    block_loop(0.05)
    assert await measured >= 0.04
    watch.cancel()
