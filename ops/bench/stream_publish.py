"""What publishing one step costs the event loop: 64 jobs, a one-token delta each.

    python ops/bench/stream_publish.py [--jobs 64] [--steps 300]

Prints microseconds of the event loop's CPU per step for the publisher as it is, and for two other ways to
send the same events: redis-py's pipeline, and one script call for all jobs (a Redis cluster would refuse it).
"""

import argparse
import asyncio
import json
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from service.connect import stream_config
from service.settings import changed, load_settings
from service.stream.connection import Connection, pack_command
from service.stream.keys import APPEND, JobKeys
from service.stream.publisher import StreamPublisher
from service.stream.writer import AttemptWriter
from service.wire.event import Delta, encode_delta

DIGEST = "0" * 64
SETTINGS = load_settings({})
Step = Callable[[int], Awaitable[None]]

# The append script's work for many jobs: per job two keys and (epoch, seq, event).
ALL_JOBS = """
for i = 1, #KEYS / 2 do
  local meta, log = KEYS[2 * i - 1], KEYS[2 * i]
  local held = redis.call('HMGET', meta, 'epoch', 'writer', 'next_seq')
  local event = ARGV[3 * i + 3]
  redis.call('XADD', log, 'MAXLEN', '~', ARGV[1], '*', 'event', event)
  redis.call('PUBLISH', ARGV[3 * i + 1], event)
  redis.call('HSET', meta, 'next_seq', ARGV[3 * i + 2])
  redis.call('PEXPIRE', meta, ARGV[2])
  redis.call('PEXPIRE', log, ARGV[2])
end
return 1
"""


@contextmanager
def redis_server() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise SystemExit("needs redis-server or valkey-server on the path")
    options = [
        "--port",
        str(port),
        "--save",
        "",
        "--appendonly",
        "no",
        "--bind",
        "127.0.0.1",
        "--loglevel",
        "warning",
    ]
    process = subprocess.Popen([binary, *options])
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


async def measure(step: Step, num_steps: int) -> dict[str, float]:
    for seq in range(20):
        await step(seq)
    cpu_us, wall_us = [], []
    for seq in range(20, 20 + num_steps):
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        await step(seq)
        cpu_us.append((time.thread_time_ns() - cpu) / 1e3)
        wall_us.append((time.perf_counter_ns() - wall) / 1e3)
    return {
        "loop_cpu_us": round(statistics.median(cpu_us)),
        "loop_cpu_p90_us": round(statistics.quantiles(cpu_us, n=10)[-1]),
        "wall_us": round(statistics.median(wall_us)),
    }


async def own(url: str, num_jobs: int, num_steps: int) -> dict[str, float]:
    publisher = StreamPublisher(stream_config(changed(SETTINGS, redis_url=url)))
    running = asyncio.create_task(publisher.run())
    ids = [f"own-{i:04d}" for i in range(num_jobs)]
    streams: list[AttemptWriter] = []
    for job_id in ids:
        opened = await publisher.open(
            job_id, origin="jobs/0/1", fingerprint=DIGEST, num_choices=1, stream=True
        )
        assert opened.stream is not None, opened
        opened.stream.start()
        streams.append(opened.stream)

    async def step(seq: int) -> None:
        for stream in streams:
            stream.delta(0, " token", (seq,))
        await streams[-1].flushed()

    figures = await measure(step, num_steps)
    publisher.stop()
    await running
    return figures


async def redis_py_pipeline(url: str, num_jobs: int, num_steps: int) -> dict[str, float]:
    keys = [JobKeys.of(f"pipe-{i:04d}", SETTINGS.namespace) for i in range(num_jobs)]
    async with Redis.from_url(url) as redis:
        await redis.script_load(APPEND.source)

        async def step(seq: int) -> None:
            async with redis.pipeline(transaction=False) as pipe:
                for i, key in enumerate(keys):
                    event = encode_delta(Delta(f"pipe-{i:04d}", 1, seq, 0, " token", (seq,)))
                    head = (key.meta, key.log, 1, "w", 3_600_000, 16384, key.live, "jobs/0/1", DIGEST, "", 1)
                    pipe.evalsha(APPEND.sha.decode(), 2, *head, "", "", 0, seq, event)
                await pipe.execute()

        return await measure(step, num_steps)


async def one_call(url: str, num_jobs: int, num_steps: int) -> dict[str, float]:
    ids = [f"one-{i:04d}" for i in range(num_jobs)]
    keys = [JobKeys.of(job_id, SETTINGS.namespace) for job_id in ids]
    connection = Connection(stream_config(changed(SETTINGS, redis_url=url)), "bench")
    await connection.connect()
    (sha,) = await connection.round_trip([pack_command("SCRIPT", "LOAD", ALL_JOBS)])
    names = [name for key in keys for name in (key.meta, key.log)]

    async def step(seq: int) -> None:
        arguments: list[bytes | str | int] = [16384, 3_600_000, 0]
        for job_id, key in zip(ids, keys, strict=True):
            arguments += [key.live, seq, encode_delta(Delta(job_id, 1, seq, 0, " token", (seq,)))]
        await connection.round_trip([pack_command("EVALSHA", sha, len(names), *names, *arguments)])

    figures = await measure(step, num_steps)
    await connection.close()
    return figures


async def main(num_jobs: int, num_steps: int) -> None:
    with redis_server() as url:
        retry = Retry(ExponentialBackoff(base=0.02, cap=0.5), 20)
        async with Redis.from_url(url, retry=retry) as redis:
            await redis.ping()
        for name, run in (
            ("publisher", own),
            ("redis_py_pipeline", redis_py_pipeline),
            ("one_call", one_call),
        ):
            print(
                json.dumps({"way": name, "jobs": num_jobs, **await run(url, num_jobs, num_steps)}), flush=True
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    asyncio.run(main(options.jobs, options.steps))
