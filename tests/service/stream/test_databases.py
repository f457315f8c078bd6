"""Two databases of one server share their channels and nothing else."""

import asyncio

import pytest
from redis.asyncio import Redis

from service.stream.control import request_cancel
from service.wire.event import Event
from tests.service.stream.one_job import JOB, seen, write
from tests.service.stream.test_control import Heard, listening
from tests.support.redis import RedisServer
from tests.support.streams import COMPLETED, NAMESPACE, Followed, open_stream, running_publisher

pytestmark = pytest.mark.redis


def urls(server: RedisServer) -> tuple[str, str]:
    return server.url, server.url.removesuffix("/0") + "/1"


async def test_a_cancellation_stays_in_its_database(redis_server: RedisServer) -> None:
    url_0, url_1 = urls(redis_server)
    heard_0, heard_1 = Heard(), Heard()
    async with (
        Redis.from_url(url_0) as redis_0,
        Redis.from_url(url_1) as redis_1,
        listening(url_0, heard_0) as listener_0,
        listening(url_1, heard_1) as listener_1,
    ):
        for listener in (listener_0, listener_1):
            await asyncio.wait_for(listener.listening.wait(), 5)
        await request_cancel(redis_1, JOB, namespace=NAMESPACE)
        await request_cancel(redis_0, "job-of-0", namespace=NAMESPACE)
        await request_cancel(redis_1, "job-of-1", namespace=NAMESPACE)
        await heard_0.until("job-of-0")
        await heard_1.until("job-of-1")
        assert (heard_0.ids, heard_1.ids) == (["job-of-0"], [JOB, "job-of-1"])


@pytest.mark.parametrize("first", [0, 1])
async def test_streams_of_one_id_in_two_databases_do_not_mix(redis_server: RedisServer, first: int) -> None:
    """Whichever was opened first, and so has the lower epoch; and again when one is taken over."""
    both = urls(redis_server)
    async with (
        running_publisher(both[0]) as worker_0,
        running_publisher(both[1]) as worker_1,
        Redis.from_url(both[0]) as redis_0,
        Redis.from_url(both[1]) as redis_1,
        Followed(redis_0, JOB) as reader_0,
        Followed(redis_1, JOB) as reader_1,
    ):
        readers, workers = (reader_0, reader_1), (worker_0, worker_1)
        streams = {n: await open_stream(workers[n], JOB) for n in (first, 1 - first)}
        for token in range(6):
            for number in (0, 1):
                await write(streams[number], range(token, token + 1), text=f"{token} of {number} ")
                await readers[number].until(seen(token + 2))
        streams[first] = await open_stream(workers[first], JOB)
        for token in range(6, 9):
            for number in (0, 1):
                await write(streams[number], range(token, token + 1), text=f"{token} of {number} ")
        for number, reader in enumerate(readers):
            assert await streams[number].end(COMPLETED)
            assert (await reader.verdict()).complete
            assert reader.gaps == []
            assert reader.assembler.texts() == ["".join(f"{token} of {number} " for token in range(9))]
        epochs = [_epochs(reader.events) for reader in readers]
        assert epochs[0].isdisjoint(epochs[1])
        assert (len(epochs[first]), len(epochs[1 - first])) == (2, 1)


def _epochs(events: list[Event]) -> set[int]:
    return {event.epoch for event in events}


async def test_a_reader_of_an_unknown_job_gets_nothing_of_the_same_id_in_another_database(
    redis_server: RedisServer,
) -> None:
    url_0, url_1 = urls(redis_server)
    async with (
        running_publisher(url_0) as worker_0,
        running_publisher(url_1) as worker_1,
        Redis.from_url(url_0) as redis_0,
        Redis.from_url(url_1) as redis_1,
        Followed(redis_0, JOB) as reader,
        Followed(redis_1, JOB) as namesake_reader,
    ):
        namesake = await open_stream(worker_1, JOB)
        await write(namesake, range(5))
        assert await namesake.end(COMPLETED)
        assert (await namesake_reader.verdict()).complete
        stream = await open_stream(worker_0, JOB)
        await write(stream, range(1), text="mine")
        await stream.end(COMPLETED)
        assert (await reader.verdict()).complete
        assert reader.gaps == []
        assert _epochs(reader.events) == {stream.epoch}
        assert reader.assembler.texts() == ["mine"]
