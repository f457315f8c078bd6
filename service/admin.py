"""Health, readiness and metrics over HTTP, for probes and Prometheus."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from service.metrics import CONTENT_TYPE

Check = Callable[[], Mapping[str, str]]
"""What is wrong, by part; empty: all is well. Called on the event loop, must not block."""


class AdminServer:
    """`/healthz` (is the process healthy?), `/readyz` (does work progress?) and `/metrics`, until closed.

    A probe answers 200 or 503 with `{"ok": …, "reasons": {part: sentence}}`. Port 0 is handled by the caller:
    here it means any free port, told by `port` after start.
    """

    def __init__(
        self, host: str, port: int, *, registry: CollectorRegistry, health: Check, ready: Check
    ) -> None:
        self.host = host
        self.port = port
        self._registry = registry
        app = web.Application()
        app.router.add_get("/healthz", _probe(health))
        app.router.add_get("/readyz", _probe(ready))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = int(self._runner.addresses[0][1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE})


def _probe(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        reasons = dict(check())
        body = orjson.dumps({"ok": not reasons, "reasons": reasons})
        return web.Response(body=body, status=503 if reasons else 200, content_type="application/json")

    return answer


async def watch_loop_lag(observe: Callable[[float], object], interval_s: float = 0.1) -> None:
    """Measure, until cancelled, how many seconds late timers run: the heartbeats to Kafka share this loop."""
    while True:
        due = time.perf_counter() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, time.perf_counter() - due))
