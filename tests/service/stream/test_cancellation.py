"""A cancelled task ends, whatever the library below does with the cancellation."""

import asyncio

import pytest

from service.stream.subscription import cancellation_kept


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


async def test_a_timeout_of_its_own_is_not_mistaken_for_a_cancellation() -> None:
    with cancellation_kept():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        assert await asyncio.sleep(0, "went on") == "went on"
