"""Faults of Redis and of the links to it."""

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.harness.fault import PAUSE_S, fault, victim
from tests.faults.harness.testbed import Testbed
from tests.support.redis import RedisServer, new_server


@fault("links to Redis cut", control="reconnecting to Redis")
async def _cut_redis(bed: Testbed, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 5)):
        bed.redis_link.cut()
        bed.note_fault()
        await asyncio.sleep(draw.uniform(0.0, 0.3))


@fault("requests to Redis lost without an error", control="reconnecting to Redis")
async def _redis_one_way(bed: Testbed, draw: random.Random) -> None:
    bed.redis_link.stall("to_server")
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    bed.redis_link.cut()
    bed.redis_link.resume()
    bed.note_fault()


@fault("replies of Redis lost without an error", control="reconnecting to Redis")
async def _redis_half_open(bed: Testbed, draw: random.Random) -> None:
    bed.redis_link.stall("to_client")
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    bed.redis_link.cut()
    bed.redis_link.resume()
    bed.note_fault()


@fault("Redis killed and empty", control="reconnecting to Redis", own_servers=True)
async def _redis_killed(bed: Testbed, draw: random.Random) -> None:
    bed.redis_forgets = bed.live_interrupted = True
    await asyncio.to_thread(bed.redis_server.stop)
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    await asyncio.to_thread(bed.redis_server.start)
    bed.note_fault()


@fault("Redis emptied", control="keys written again")
async def _flush(bed: Testbed, draw: random.Random) -> None:
    del draw
    await bed.forget_keys()
    bed.note_fault()


@fault("Redis emptied and a worker killed", control="commit after completion")
async def _flush_and_kill(bed: Testbed, draw: random.Random) -> None:
    await bed.forget_keys()
    bed.workers[victim(bed, draw)].kill()
    bed.note_fault()


@fault("Redis paused", control="deltas kept while Redis is silent")
async def _redis_paused(bed: Testbed, draw: random.Random) -> None:
    bed.redis_link.stall("to_server")
    bed.redis_link.stall("to_client")
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    bed.redis_link.resume()
    bed.note_fault()


@contextmanager
def _configured(bed: Testbed, name: str, value: str, after: str) -> Iterator[None]:
    with contextlib.closing(bed.redis_server.client()) as client:
        client.config_set(name, value)
        try:
            yield
        finally:
            client.config_set(name, after)


@fault("Redis out of memory", control="waiting for Redis", own_servers=True)
async def _redis_oom(bed: Testbed, draw: random.Random) -> None:
    with _configured(bed, "maxmemory", "1", "0"):
        await asyncio.sleep(draw.uniform(*PAUSE_S))
    bed.note_fault()


@fault("Redis read-only", control="waiting for Redis", own_servers=True)
async def _redis_read_only(bed: Testbed, draw: random.Random) -> None:
    with contextlib.closing(bed.redis_server.client()) as client:
        client.replicaof("127.0.0.1", "1")
        await asyncio.sleep(draw.uniform(*PAUSE_S))
        client.replicaof("NO", "ONE")
    bed.note_fault()


@fault("replica of Redis promoted", control="reconnecting to Redis", own_servers=True)
async def _promotion(bed: Testbed, draw: random.Random) -> None:
    """Replication is asynchronous: the last writes may be missing on the server that takes over."""
    bed.redis_forgets = bed.live_interrupted = True
    former = bed.redis_server
    replica = await asyncio.to_thread(_replica_of, former, bed.folder / "replica")
    bed.exit_stack.callback(former.start)
    bed.exit_stack.callback(replica.stop)
    await asyncio.sleep(draw.uniform(0.0, 0.5))
    await asyncio.to_thread(former.stop)
    with contextlib.closing(replica.client()) as client:
        client.replicaof("NO", "ONE")
    bed.redis_server = replica
    bed.auditor.redirect(replica.url)
    bed.redis_link.redirect(replica.port)
    bed.redis_link.cut()
    bed.note_fault()


def _replica_of(server: RedisServer, folder: Path) -> RedisServer:
    """Returns when it has all that the other one has."""
    folder.mkdir()
    replica = new_server(folder)
    replica.start()
    with contextlib.closing(replica.client()) as client:
        client.replicaof("127.0.0.1", str(server.port))
        while client.info("replication")["master_link_status"] != "up":  # type: ignore[index]
            time.sleep(0.01)
    return replica
