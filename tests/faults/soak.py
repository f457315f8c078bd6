"""One worker under continuous mixed jobs, to see whether it grows: `python -m tests.faults.soak --minutes 30 [--json]`.

A worker process with the deterministic engine serves streams, cancellations, choices and refused jobs on real Kafka and
real Redis. Its memory, open files and threads are sampled, and so are Redis's memory and keys without a time to live. A
line is fitted to the second half, when caches are full and the first jobs have expired. The exit status is 1 if
something grows beyond its bound, or a job does not end as it should.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from service.client import Client
from tests.faults.soak_jobs import Load
from tests.support.kafka import KafkaBroker
from tests.support.processes import reap, serving_worker
from tests.support.redis import RedisServer
from tests.support.service import ROOT, ServiceUnderTest, new_service

MAX_GROWTH = {
    "rss_mib": 4.0,
    "fds": 2.0,
    "threads": 1.0,
    "keys_without_ttl": 2.0,
    "redis_mib": 12.0,
}
"""How much each may grow over the second half, by the fitted line. Memory: what the allocator and the histograms of
metrics move by; 100,000 jobs that left 200 bytes each would show. Redis: the load is not even, and keys expire late."""
STREAM_TTL_S = 60
NUM_USERS = 24
SAMPLE_S = 5.0
MIN_MINUTES = 2.0
"""The first half must be longer than the time to live, so that Redis is full when the second begins."""


@dataclass(frozen=True)
class Sample:
    at_s: float
    rss_mib: float
    fds: int
    threads: int
    redis_mib: float
    keys: int
    keys_without_ttl: int
    jobs: int
    """Ended since the beginning."""


def growth(samples: list[Sample], name: str) -> float:
    """Return how much the line through these samples rises from the first to the last."""
    times = [sample.at_s for sample in samples]
    slope = statistics.linear_regression(times, [getattr(sample, name) for sample in samples]).slope
    return slope * (times[-1] - times[0])


def redis_state(redis_server: RedisServer) -> tuple[float, int, int]:
    """Memory in MiB, number of keys, and how many of them never expire."""
    with closing(redis_server.client()) as client:
        keys = list(client.scan_iter(count=1000))
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.pttl(key)
            lives = pipe.execute()
        used = client.info("memory")["used_memory"]
    return used / (1 << 20), len(keys), sum(life == -1 for life in lives)


async def sample(worker: psutil.Process, redis_server: RedisServer, began_s: float, jobs: int) -> Sample:
    redis_mib, num_keys, num_lasting = await asyncio.to_thread(redis_state, redis_server)
    with worker.oneshot():
        rss, fds, threads = worker.memory_info().rss, worker.num_fds(), worker.num_threads()
    at_s = time.monotonic() - began_s
    return Sample(at_s, rss / (1 << 20), fds, threads, redis_mib, num_keys, num_lasting, jobs)


async def watch(
    worker: psutil.Process, redis_server: RedisServer, load: Load, minutes: float, *, quiet: bool
) -> list[Sample]:
    began_s = time.monotonic()
    samples: list[Sample] = []
    while time.monotonic() - began_s < minutes * 60:
        await asyncio.sleep(SAMPLE_S)
        load.check()
        samples.append(await sample(worker, redis_server, began_s, load.ended.total()))
        if not quiet and len(samples) % 12 == 0:
            print(_line(samples[-1]), flush=True)
    return samples


def _line(found: Sample) -> str:
    return (
        f"{found.at_s:6.0f} s  {found.jobs:7,} jobs  worker {found.rss_mib:6.1f} MiB, {found.fds} files, "
        f"{found.threads} threads  Redis {found.redis_mib:5.1f} MiB, {found.keys:,} keys, "
        f"{found.keys_without_ttl} for ever"
    )


def start_worker(service: ServiceUnderTest, log: Path) -> "subprocess.Popen[bytes]":
    settings = {
        "WORKER_ID": "soak",
        "DETERMINISTIC_STEP_MS": "2",
        "MAX_NUM_SEQS": "32",
        "STREAM_TTL_S": str(STREAM_TTL_S),
        "LOG_LEVEL": "warning",
    }
    environ = os.environ | service.environ | {f"TAILRACE_{name}": value for name, value in settings.items()}
    with log.open("wb") as out:
        command = [sys.executable, "-m", "service.cli", "serve"]
        return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT)


@dataclass(frozen=True)
class Findings:
    samples: list[Sample]
    ended: Counter[str]
    """Jobs by kind and status."""
    problems: list[str]

    @property
    def second_half(self) -> list[Sample]:
        return self.samples[len(self.samples) // 2 :]

    def grown(self) -> dict[str, float]:
        return {name: growth(self.second_half, name) for name in MAX_GROWTH}

    def failures(self) -> list[str]:
        too_much = [
            f"{name} grew by {found:.2f} in the second half; the bound is {MAX_GROWTH[name]}"
            for name, found in self.grown().items()
            if found > MAX_GROWTH[name]
        ]
        return too_much + self.problems


async def soak(minutes: float, folder: Path, *, quiet: bool = False) -> Findings:
    """Run it; raises what Kafka, Redis or the worker fail with."""
    (folder / "kafka").mkdir()
    (folder / "redis").mkdir()
    kafka = KafkaBroker(folder / "kafka")
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise SystemExit("neither redis-server nor valkey-server is on the path")
    redis_server = RedisServer(binary, folder / "redis")
    processes = []
    try:
        await asyncio.to_thread(kafka.start)
        await asyncio.to_thread(redis_server.start)
        service = await new_service(kafka, redis_server, partitions=4)
        processes.append(start_worker(service, folder / "worker.log"))
        await serving_worker(service, "soak")
        async with Client(settings=service.settings(stream_ttl_s=str(STREAM_TTL_S))) as client:
            load = Load(client)
            async with load.running(NUM_USERS):
                worker = psutil.Process(processes[0].pid)
                samples = await watch(worker, redis_server, load, minutes, quiet=quiet)
        return Findings(samples, load.ended, load.problems)
    except BaseException:
        print((folder / "worker.log").read_text()[-4000:] if processes else "", file=sys.stderr)
        raise
    finally:
        reap(*processes)
        redis_server.stop()
        await asyncio.to_thread(kafka.stop)


def report(findings: Findings, *, as_json: bool) -> None:
    first, last, grown = findings.second_half[0], findings.samples[-1], findings.grown()
    if as_json:
        document: dict[str, Any] = {
            "seconds": last.at_s,
            "jobs": findings.ended,
            "growth_in_second_half": grown,
            "bounds": MAX_GROWTH,
            "failures": findings.failures(),
            "samples": [asdict(found) for found in findings.samples],
        }
        print(json.dumps(document, indent=2))
        return
    print(f"{findings.ended.total():,} jobs in {last.at_s:.0f} s: {dict(sorted(findings.ended.items()))}")
    print(f"second half, {last.at_s - first.at_s:.0f} s and {last.jobs - first.jobs:,} jobs:")
    for name, rise in grown.items():
        values = [getattr(found, name) for found in findings.second_half]
        print(
            f"  {name:17} {rise:+7.2f} by the line (bound {MAX_GROWTH[name]}), {min(values):.1f} to {max(values):.1f}"
        )
    print(*(findings.failures() or ["nothing grows"]), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.minutes < MIN_MINUTES:
        parser.error(f"--minutes must be at least {MIN_MINUTES}")
    folder = Path(tempfile.mkdtemp(prefix="tailrace-soak-"))
    try:
        findings = asyncio.run(soak(options.minutes, folder, quiet=options.json))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(findings, as_json=options.json)
    return 1 if findings.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
