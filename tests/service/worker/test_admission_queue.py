"""Jobs wait for room in the scheduler's queue: in order, with all requests or none, and may leave at any time."""

import asyncio

import pytest

from service.ingest.delivery import Delivery
from service.worker.intake import Admission, AdmissionQueue
from service.worker.job_run import JobRun


class Queue:
    """The scheduler's queue: how much room it has, and which jobs were added, in order."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.num_looks = 0
        self.admission = AdmissionQueue(self._look)
        self.took: list[str] = []

    def _look(self) -> int:
        self.num_looks += 1
        return self.num_free

    async def take(self, run: JobRun, num_requests: int, limit_s: float | None = None) -> Admission:
        admitted = await self.admission.wait(run, num_requests, limit_s)
        if admitted is Admission.ADMITTED:
            self.num_free -= num_requests
            self.took.append(run.job_id)
        return admitted

    async def free(self, count: int) -> None:
        self.num_free += count
        self.admission.wake_next()
        await settled()


def new_run(job_id: str) -> JobRun:
    run = JobRun.begin(Delivery("jobs", 0, 7, 1, None, b"", (), 0), now_s=0.0, wall_s=1e9)
    run.job_id = job_id
    return run


async def settled() -> None:
    """Each woken job has checked for room, was added and woke the next."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_with_room_no_job_waits() -> None:
    queue = Queue(4)
    waiting = queue.take(new_run("a"), 4)
    with pytest.raises(StopIteration):
        waiting.send(None)
    assert queue.took == ["a"]
    assert len(queue.admission) == 0


async def test_jobs_are_admitted_in_order_with_all_requests_at_once() -> None:
    queue = Queue(3)
    async with asyncio.TaskGroup() as group:
        for job_id, num_requests in (("a", 4), ("b", 1), ("c", 2)):
            group.create_task(queue.take(new_run(job_id), num_requests))
        await settled()
        assert queue.took == [], "a needs 4, and no job goes past it"
        await queue.free(1)
        assert queue.took == ["a"]
        assert await queue.take(new_run("none"), 0, limit_s=0) is Admission.LATE, (
            "newcomers stand behind the others"
        )
        await queue.free(3)
        assert queue.took == ["a", "b", "c"], "one call is enough for all that fit"
    assert queue.num_free == 0


async def test_a_job_woken_without_room_keeps_its_place() -> None:
    """A preempted request took the place between the call and the check."""
    queue = Queue(0)
    async with asyncio.TaskGroup() as group:
        for job_id in ("a", "b"):
            group.create_task(queue.take(new_run(job_id), 1))
        await settled()
        queue.num_free = 1
        queue.admission.wake_next()
        queue.num_free = 0
        await settled()
        assert queue.took == []
        await queue.free(2)
    assert queue.took == ["a", "b"]


async def test_waiting_jobs_check_for_room_only_when_woken() -> None:
    queue = Queue(0)
    async with asyncio.TaskGroup() as group:
        for job_id in ("a", "b", "c"):
            group.create_task(queue.take(new_run(job_id), 1))
        await settled()
        num_looks = queue.num_looks
        await settled()
        assert queue.num_looks == num_looks
        queue.admission.wake_next()
        await settled()
        assert queue.num_looks == num_looks + 1, "the first only, and it is not woken for nothing"
        await queue.free(3)


@pytest.mark.parametrize("first_leaves", [True, False])
async def test_a_job_leaves_at_once_from_any_place(first_leaves: bool) -> None:
    queue = Queue(1)
    big, small = new_run("big"), new_run("small")
    waits = [asyncio.create_task(queue.take(big, 2)), asyncio.create_task(queue.take(small, 1))]
    await settled()
    queue.admission.leave(big if first_leaves else small)
    await settled()
    assert waits[not first_leaves].result() is Admission.LEFT
    assert queue.took == (["small"] if first_leaves else []), "whoever is first now need not wait for a call"
    await queue.free(2)
    assert {wait.result() for wait in waits} == {Admission.ADMITTED, Admission.LEFT}
    assert len(queue.admission) == 0


async def test_late_and_cancelled_jobs_make_way() -> None:
    queue = Queue(0)
    cancelled = asyncio.create_task(queue.take(new_run("closed"), 1))
    await settled()
    assert await queue.take(new_run("late"), 1, limit_s=0.01) is Admission.LATE
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert len(queue.admission) == 0
    await queue.free(1)
    assert await queue.take(new_run("next"), 1) is Admission.ADMITTED


async def test_leaving_without_waiting_does_nothing() -> None:
    queue = Queue(1)
    run = new_run("a")
    queue.admission.leave(run)
    assert await queue.take(run, 1) is Admission.ADMITTED
