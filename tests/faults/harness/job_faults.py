"""Faults of what is sent: cancelled, sent twice, no jobs at all."""

import asyncio
import json
import random

from tests.faults.harness.fault import fault
from tests.faults.harness.jobs import job
from tests.faults.harness.testbed import Testbed


@fault("jobs cancelled at every moment", control="cancellation before opening")
async def _cancels(bed: Testbed, draw: random.Random) -> None:
    early = [job(1000 + index) for index in range(6)]
    for body in early:
        await bed.cancel(body["id"])
        bed.expected_status[body["id"]] = "cancelled"
    await bed.publish(early)
    for job_id in draw.sample(sorted(bed.ledger.bodies), 12):
        await bed.cancel(job_id)
        await asyncio.sleep(draw.uniform(0.0, 0.1))


@fault("the same records sent twice", control="suppressed duplicates")
async def _duplicates(bed: Testbed, draw: random.Random) -> None:
    again = [bed.ledger.bodies[job_id] for job_id in draw.sample(sorted(bed.ledger.bodies), 12)]
    await bed.publish(again)
    await bed.auditor.wait_until_ended([body["id"] for body in again], 60)
    await bed.publish(again)


POISON: list[bytes | None] = [
    None,
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b'{"id": 7}',
    json.dumps({"id": "x", "prompt": "x", "max_tokens": -1}).encode(),
    json.dumps({"id": "x", "prompt": "x" * 200_000}).encode(),
    json.dumps({"id": "x", "prompt": "x", "temprature": 1}).encode(),
    json.dumps({"id": "x", "prompt": "x", "response_format": {"type": "regex", "regex": "("}}).encode(),
]


@fault("records that are no jobs", control="refusal of unreadable records")
async def _poison(bed: Testbed, draw: random.Random) -> None:
    for index, value in enumerate(draw.sample(POISON, len(POISON))):
        key = f"poison-{index}"
        await bed.publish_records([(key, {}, value and value.replace(b'"x"', f'"{key}"'.encode(), 1))])
