"""Faults of the workers: killed, stopped, joined, starved, with a wrong clock."""

import asyncio
import random
import signal

from tests.faults.harness.fault import PAUSE_S, fault, victim
from tests.faults.harness.jobs import job
from tests.faults.harness.testbed import SESSION_TIMEOUT_S, Testbed

KILLER = "killer"
MOST_RESTARTS = 12


@fault(
    "jobs longer than the poll interval",
    control="polling while full",
    workers=1,
    limit_s=90,
    settings={
        "max_poll_interval_s": "10",
        "max_num_seqs": "16",
        "max_waiting": "16",
        "deterministic_step_ms": "60",
    },
)
async def _long_jobs(bed: Testbed, draw: random.Random) -> None:
    """Jobs of twelve seconds begin together, and the worker has no room for another one until they end."""
    del draw
    bed.undisturbed = True
    await bed.auditor.wait_until_ended(list(bed.ledger.bodies), 60)
    await bed.publish([job(5000 + index, max_tokens=200, n=1) for index in range(36)])


@fault("worker killed", control="commit after completion")
async def _kill(bed: Testbed, draw: random.Random) -> None:
    bed.workers[victim(bed, draw)].kill()
    bed.note_fault()


@fault("workers killed again and again, with cancellations", control="resume", workers=3)
async def _kill_storm(bed: Testbed, draw: random.Random) -> None:
    for round_ in range(3):
        for job_id in draw.sample(sorted(bed.ledger.bodies), 4):
            await bed.cancel(job_id)
        bed.workers[victim(bed, draw)].kill()
        bed.start_worker(f"replacement-{round_}")
        await asyncio.sleep(draw.uniform(*PAUSE_S))
    bed.note_fault()


@fault("worker told to stop while another joins", control="commit after completion")
async def _rolling(bed: Testbed, draw: random.Random) -> None:
    bed.note_fault()
    bed.start_worker("joining")
    await asyncio.sleep(draw.uniform(*PAUSE_S))
    name = victim(bed, draw)
    bed.exit_codes[name] = await bed.workers[name].terminate()


@fault("worker stopped and woken after its session", control="fence")
async def _zombie(bed: Testbed, draw: random.Random) -> None:
    sleeper = bed.workers[victim(bed, draw)]
    sleeper.signal(signal.SIGSTOP)
    bed.note_fault()
    await asyncio.sleep(SESSION_TIMEOUT_S + draw.uniform(*PAUSE_S))
    sleeper.signal(signal.SIGCONT)


@fault(
    "a record that kills its worker",
    control="attempts without progress",
    environ={"FAULTS_DIES_AT": KILLER},
)
async def _killer(bed: Testbed, draw: random.Random) -> None:
    """Workers are started again, as an orchestrator does, until the record is refused."""
    del draw
    bed.expected_status[KILLER] = "failed"
    await bed.publish([job(3000) | {"id": KILLER}])
    for round_ in range(MOST_RESTARTS):
        while all(worker.exit_code is None for worker in bed.workers.values()):
            if not await bed.auditor.wait_until_ended([KILLER], 0.05):
                return
        for name in [name for name, worker in bed.workers.items() if worker.exit_code is not None]:
            del bed.workers[name]
            await bed.forget_members(name)
            bed.start_worker(f"{name}-{round_}", FAULTS_DIES_AT=KILLER)
            bed.note_fault()


@fault("rebalance after rebalance", control="resume")
async def _rebalance_storm(bed: Testbed, draw: random.Random) -> None:
    bed.note_fault()
    for round_ in range(4):
        name = f"guest-{round_}"
        worker = bed.start_worker(name)
        await bed.publish([job(6000 + 10 * round_ + index, max_tokens=200) for index in range(8)])
        await asyncio.sleep(draw.uniform(0.8, 2.0))
        bed.exit_codes[name] = await worker.terminate()


@fault("a worker's clock is three hours off", control="shared clock")
async def _clock(bed: Testbed, draw: random.Random) -> None:
    offset_s = draw.choice([-3, 3]) * 3600
    bed.start_worker("wrong-clock", FAULTS_CLOCK_OFFSET_S=str(offset_s))
    for worker in [each for name, each in bed.workers.items() if name != "wrong-clock"]:
        bed.exit_codes[worker.name] = await worker.terminate()
    bed.note_fault()
    far = [job(2000 + index, deadline=3600) for index in range(4)]
    past = [job(2100 + index, deadline=0.001) for index in range(4)]
    bed.expected_status |= {body["id"]: "completed" for body in far}
    bed.expected_status |= {body["id"]: "expired" for body in past}
    await bed.publish(far + past)
