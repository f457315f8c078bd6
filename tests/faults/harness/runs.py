"""One run: a load before, during and after a fault; then everything is read and judged."""

import asyncio
import math
import random
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness.fault import Fault
from tests.faults.harness.invariants import Run, Texts, Violation, judge
from tests.faults.harness.jobs import NUM_JOBS, job
from tests.faults.harness.testbed import Testbed, running_testbed
from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer

JOBS_BEFORE, JOBS_DURING, JOBS_AFTER = 24, 8, 8
END_LIMIT_S = 60.0
COMMIT_LIMIT_S = 10.0
METRICS_LIMIT_S = 20.0
"""A worker that was put out of its group learns of it at its next heartbeat."""


@dataclass(frozen=True, slots=True)
class Outcome:
    fault: str
    seed: int
    violations: tuple[Violation, ...]
    num_jobs: int
    num_duplicates: int
    """Terminal records beyond one for each job."""
    recovery_s: tuple[float, ...]
    """Per job that was in flight at the fault: until its next event or its result."""
    duration_s: float


async def expected_texts(folder: Path, kafka: KafkaBroker, redis_server: RedisServer) -> Texts:
    """Runs every job once without a fault; returns the text of each choice."""
    async with running_testbed(
        folder, kafka, redis_server, deterministic_step_ms="0", max_num_seqs="64"
    ) as bed:
        bed.start_worker("oracle")
        bodies = [job(index) for index in range(NUM_JOBS)]
        await bed.publish(bodies)
        missing = await bed.auditor.wait_until_ended([body["id"] for body in bodies], END_LIMIT_S)
        assert not missing, f"without a fault these did not end: {sorted(missing)}"
        await bed.stop_workers()
        return {
            record.job_id: [choice["text"] for choice in record.body["choices"]]
            for record in bed.auditor.traces.results
        }


async def run_once(
    fault: Fault,
    seed: int,
    folder: Path,
    servers: tuple[KafkaBroker, RedisServer],
    texts: Texts,
    *,
    without: Sequence[str] = (),
    end_limit_s: float = END_LIMIT_S,
) -> Outcome:
    draw = random.Random(seed)
    started_s = time.monotonic()
    ahead = "on" if seed % 2 else "off"
    settings = {"async_scheduling": ahead} | fault.settings
    async with running_testbed(folder, *servers, without=without, **settings) as bed:
        names = [f"worker-{i}" for i in range(fault.workers)]
        for name in names:
            bed.start_worker(name, **fault.environ)
        await bed.joined(*names)
        order = draw.sample(range(NUM_JOBS), JOBS_BEFORE + JOBS_DURING + JOBS_AFTER)
        before, during = order[:JOBS_BEFORE], order[JOBS_BEFORE : JOBS_BEFORE + JOBS_DURING]
        await bed.publish([job(index) for index in before])
        await _running(bed, draw)
        injecting = asyncio.create_task(fault.inject(bed, draw))
        publishing = asyncio.create_task(bed.publish([job(index) for index in during]))
        await asyncio.gather(injecting, publishing)
        await bed.publish([job(index) for index in order[JOBS_BEFORE + JOBS_DURING :]])
        return await finish(bed, fault.name, seed, texts, started_s, end_limit_s=end_limit_s)


async def _running(bed: Testbed, draw: random.Random) -> None:
    """Waits until some jobs are in the middle, a random way in."""
    wanted = draw.randint(20, 300)
    async with asyncio.timeout(END_LIMIT_S), bed.auditor.changed:
        await bed.auditor.changed.wait_for(lambda: sum(map(len, bed.auditor.traces.live.values())) >= wanted)


async def finish(
    bed: Testbed, name: str, seed: int, texts: Texts, started_s: float, *, end_limit_s: float = END_LIMIT_S
) -> Outcome:
    """Waits until all has ended and is committed, stops the workers, reads every trace and judges."""
    unended = await bed.auditor.wait_until_ended(bed.ledger.bodies, end_limit_s)
    if not unended:
        await _committed(bed)
    leaks = [] if unended else await _held(bed)
    await bed.stop_workers()
    leaks += [
        f"worker {worker} ended with {code} at SIGTERM"
        for worker, code in bed.exit_codes.items()
        if code != 0
    ]
    await bed.auditor.read_to_the_end()
    await bed.auditor.read_logs(bed.ledger.bodies)
    run = Run(
        bed.ledger,
        bed.auditor.traces,
        texts,
        bed.redis_forgets,
        bed.live_interrupted or bed.auditor.num_live_cuts > 0,
        unended,
        leaks,
        frozenset(bed.may_be_answered_twice),
        bed.expected_status,
        bed.undisturbed,
    )
    traces = bed.auditor.traces
    return Outcome(
        name,
        seed,
        tuple(judge(run)),
        len(bed.ledger.bodies),
        len(traces.results) - len({record.job_id for record in traces.results}),
        tuple(_recoveries(bed)),
        time.monotonic() - started_s,
    )


async def _committed(bed: Testbed) -> None:
    """Waits for a commit beyond every record; the judge says what is missing."""
    ends: dict[int, int] = {}
    for sent in bed.ledger.sent:
        ends[sent.partition] = max(ends.get(sent.partition, 0), sent.offset + 1)
    deadline = time.monotonic() + COMMIT_LIMIT_S
    while time.monotonic() < deadline:
        last = {commit.partition: commit.offset for commit in bed.auditor.traces.commits}
        if all(last.get(partition, 0) >= end for partition, end in ends.items()):
            return
        await asyncio.sleep(0.05)


async def _held(bed: Testbed) -> list[str]:
    """What live workers still hold although nothing is left to do; asked until it is nothing, or too late."""
    deadline = time.monotonic() + METRICS_LIMIT_S
    while True:
        held = []
        for worker in bed.workers.values():
            if worker.exit_code is None:
                held += await asyncio.to_thread(_metrics_above_zero, worker.name, worker.admin_port)
        if not held or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.1)


MUST_BE_ZERO = (
    'tailrace_blocks{state="held"}',
    'tailrace_requests{state="running"}',
    'tailrace_requests{state="waiting"}',
    "tailrace_incomplete_offsets",
    "tailrace_redis_backlog_jobs",
)


def _metrics_above_zero(name: str, port: int) -> list[str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
            lines = answer.read().decode().splitlines()
    except OSError as error:
        return [f"worker {name} does not answer on its admin port: {error}"]
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return [
        f"worker {name}: {metric} is {found[metric]} with nothing to do"
        for metric in MUST_BE_ZERO
        if float(found.get(metric, 0)) != 0
    ]


def _recoveries(bed: Testbed) -> list[float]:
    since = bed.affected_s
    if since is None:
        return []
    found = []
    results = {record.job_id: record.seen_s for record in reversed(bed.auditor.traces.results)}
    for job_id, events in bed.auditor.traces.live.items():
        ended_s = results.get(job_id, float("inf"))
        if events[0][0] < since < ended_s:
            later = [at for at, _ in events if at > since]
            found.append(min([ended_s, *later]) - since)
    return found


def quantile(values: Sequence[float], q: float) -> float:
    """By nearest rank; 0 for an empty sample."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0
