"""Every wait ends: at its limit, at its event, or at a cancellation that no library may lose."""

import asyncio

import pytest
import structlog

from service.waiting import Backoff, cancellation_kept, completes_before, wait_for


async def test_a_cancellation_that_arrives_as_a_write_completes_is_not_lost() -> None:
    written = asyncio.Event()

    async def write() -> None:
        with cancellation_kept():
            await asyncio.wait_for(written.wait(), 5)
        pytest.fail("went on although it was cancelled")

    task = asyncio.create_task(write())
    for _ in range(3):
        await asyncio.sleep(0)
    written.set()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_inside_the_work_is_not_mistaken_for_a_cancellation() -> None:
    with cancellation_kept():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        assert await asyncio.sleep(0, "went on") == "went on"


async def test_waiting_for_an_event_ends_at_the_limit() -> None:
    event = asyncio.Event()
    assert not await wait_for(event, 0.001)
    event.set()
    assert await wait_for(event, 0)


async def test_work_that_wins_the_race_is_heard_and_work_that_loses_has_ended() -> None:
    event, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            event.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    assert not await completes_before(event, work())
    assert ended.is_set()
    with pytest.raises(ZeroDivisionError):
        await completes_before(asyncio.Event(), _divide())


async def test_work_that_loses_may_finish_within_its_grace() -> None:
    event = asyncio.Event()
    event.set()
    assert await completes_before(event, asyncio.sleep(0.01), grace_s=5)
    assert not await completes_before(event, asyncio.sleep(5), grace_s=0.01)


async def test_a_cancelled_race_cancels_its_work() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(completes_before(asyncio.Event(), work()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_race_that_is_cancelled_during_its_grace_cancels_its_work_too() -> None:
    event, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(completes_before(event, work(), grace_s=60))
    await asyncio.sleep(0)
    event.set()
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_long_race_is_reported_again_and_again() -> None:
    reports = []
    event = asyncio.Event()

    def report() -> None:
        reports.append(1)
        if len(reports) == 3:
            event.set()

    assert not await completes_before(event, asyncio.sleep(30), report=report, report_every_s=0.001)
    assert len(reports) == 3


def test_back_off_doubles_up_to_its_limit_and_starts_over_after_a_success() -> None:
    backoff = Backoff(0.5, 3)
    assert [backoff.failed() for _ in range(4)] == [0.5, 1, 2, 3]
    backoff.succeeded()
    assert backoff.failed() == 0.5
    assert Backoff(5, 1).failed() == 1


async def test_failures_are_logged_at_most_once_per_interval_and_the_recovery_once() -> None:
    backoff = Backoff(0.1, 1, failure_event="lost", recovery_event="back", log_every_s=60)
    with structlog.testing.capture_logs() as logs:
        backoff.failed(OSError("away"))
        backoff.failed(OSError("away"))
        backoff.succeeded()
        backoff.succeeded()
    assert [(entry["event"], entry.get("reason")) for entry in logs] == [("lost", "away"), ("back", None)]


async def _divide() -> None:
    raise ZeroDivisionError
