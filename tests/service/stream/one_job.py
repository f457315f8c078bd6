"""Helpers for one job's stream: its assembled events, one event per token, and a reader's progress."""

from collections.abc import Callable

from redis.asyncio import Redis

from service.stream.assemble import Fed, StreamAssembler
from service.stream.publisher import StreamPublisher
from service.stream.writer import AttemptWriter
from service.wire.event import Event
from tests.support.streams import Followed, open_stream

JOB = "job-1"


def assembled(events: list[Event], job_id: str = JOB) -> StreamAssembler:
    assembler = StreamAssembler(job_id)
    for event in events:
        assert assembler.feed(event) is Fed.APPLIED, f"hole or duplicate at {event}"
    return assembler


async def begin(
    publisher: StreamPublisher, text: str = "a", token_ids: tuple[int, ...] = (1,)
) -> AttemptWriter:
    """One attempt up to its first flush."""
    stream = await open_stream(publisher, JOB)
    stream.delta(0, text, token_ids)
    assert await stream.flushed()
    return stream


async def write(stream: AttemptWriter, tokens: range, *, text: str | None = None) -> None:
    """One flush, and so one event, per token."""
    for token in tokens:
        stream.delta(0, f"{token} " if text is None else text, (token,))
        assert await stream.flushed()


def words(stop: int) -> str:
    return "".join(f"{token} " for token in range(stop))


def seen(count: int) -> Callable[[Followed], bool]:
    return lambda followed: len(followed.events) >= count


async def begin_and_follow(
    publisher: StreamPublisher, redis: Redis, num_tokens: int = 0
) -> tuple[AttemptWriter, Followed]:
    """A reader that has seen the first attempt start and write so many tokens."""
    stream = await open_stream(publisher, JOB)
    followed = Followed(redis, JOB)
    stream.start()
    await write(stream, range(num_tokens))
    await followed.until(seen(1 + num_tokens))
    return stream, followed
