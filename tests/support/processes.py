"""Workers in processes of their own."""

import subprocess
from typing import Any

from tests.support.service import ServiceUnderTest

REAP_LIMIT_S = 20.0


async def serving_worker(service: ServiceUnderTest, *workers: str) -> None:
    """Until each of these workers has answered a job, so each has partitions."""
    waiting, round_ = set(workers), 0
    while waiting:
        probes = [{"id": f"probe-{round_}-{i}", "prompt": "x", "max_tokens": 1} for i in range(16)]
        await service.publish(probes)
        results = await service.wait_for_results([probe["id"] for probe in probes])
        waiting -= {result.worker for result in results.values()}
        round_ += 1


def reap(*processes: "subprocess.Popen[Any]") -> None:
    """End what still runs, politely first, and leave no zombie."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(REAP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
