"""The mechanisms behind the guarantees, each switched off in one worker process to show that the judge notices."""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

MECHANISMS: dict[str, Callable[[], None]] = {}
"""By name: what each of them keeps from happening is in its docstring."""


def switch_off(name: str) -> None:
    MECHANISMS[name]()


def _mechanism(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        MECHANISMS[name] = function
        return function

    return register


@_mechanism("fence")
def _no_fence() -> None:
    """An older attempt takes the stream back from a newer one."""
    _change_append("if held_epoch > epoch or (held_epoch == epoch and held[2] ~= ARGV[2]) then\n  return 0\nend", (
        "if held_epoch > epoch then\n  held_epoch = -1\nend"
    ))


@_mechanism("keys written again")
def _gives_up_a_forgotten_job() -> None:
    """A job whose keys are gone counts as another worker's."""
    _change_append("local epoch = tonumber(ARGV[1])", "local epoch = tonumber(ARGV[1])\nif not held[1] then\n  return 0\nend")
    from service.worker.job_flow import JobFlow

    JobFlow._retry = lambda self, run: None  # type: ignore[method-assign]


def _change_append(old: str, new: str) -> None:
    from service.stream import keys
    from service.stream.publisher import StreamPublisher

    source = keys._APPEND % {"fence": keys.FENCE}
    changed = source.replace(old, new)
    assert changed != source
    script = keys.Script.of(changed)
    StreamPublisher.__init__ = functools.partialmethod(StreamPublisher.__init__, append=script)  # type: ignore[method-assign,assignment]


@_mechanism("decided outcome")
def _no_decided_outcome() -> None:
    """An attempt that takes over decides anew what an earlier one has decided."""
    _change_opened(lambda opened: replace(opened, decided=None))


@_mechanism("resume")
def _no_resume() -> None:
    """A job taken over begins again, although its tokens are in the log."""
    from service.stream.assemble import ResumedChoice

    _change_opened(
        lambda opened: replace(opened, resumed=tuple(ResumedChoice() for _ in opened.resumed))
    )


@_mechanism("attempts without progress")
def _no_limit_of_attempts() -> None:
    """A job that ends its worker is passed on for ever."""
    _change_opened(lambda opened: replace(opened, attempts_without_progress=1))


def _change_opened(change: Callable[[Any], Any]) -> None:
    from service.stream.publisher import StreamPublisher

    original = StreamPublisher.open

    async def opened(self: StreamPublisher, *args: Any, **kwargs: Any) -> Any:
        return change(await original(self, *args, **kwargs))

    StreamPublisher.open = opened  # type: ignore[method-assign]


@_mechanism("commit after completion")
def _commits_what_is_fetched() -> None:
    """A record is committed as soon as it is fetched, and is lost with its worker."""
    from service.ingest.offsets import PartitionOffsets

    PartitionOffsets.committable = lambda self: (self.next_offset, "")  # type: ignore[method-assign]


@_mechanism("commit map")
def _no_commit_map() -> None:
    """Completed records beyond the first incomplete one are delivered again; they are suppressed by their keys alone."""
    from service.ingest import commits

    commits.decode_completed = lambda *_: None


@_mechanism("acknowledged results")
def _sends_and_forgets() -> None:
    """A job counts as complete before Kafka has its result."""
    from service.ingest.producer import ResultProducer

    original = ResultProducer.send

    async def send(self: ResultProducer, *args: Any, **kwargs: Any) -> None:
        task = asyncio.get_running_loop().create_task(original(self, *args, **kwargs))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    ResultProducer.send = send  # type: ignore[method-assign]


@_mechanism("waiting for Redis")
def _blames_the_job() -> None:
    """A refusal of the server is taken for a fault of the job."""
    from service.stream import write_loop

    write_loop.concerns_one_job = lambda error: True


@_mechanism("reconnecting to Redis")
def _ends_with_its_connection() -> None:
    """The first failure of Redis ends the worker."""
    from service.stream import write_loop

    write_loop.UNAVAILABLE = ()


@_mechanism("deltas kept while Redis is silent")
def _drops_deltas() -> None:
    """What is generated while a round trip takes long is not written later."""
    import time

    from service.stream.connection import Connection
    from service.stream.writer import AttemptWriter

    since_s: list[float] = []
    round_trip, delta = Connection.round_trip, AttemptWriter.delta

    async def timed(self: Connection, commands: Any) -> Any:
        since_s.append(time.monotonic())
        try:
            return await round_trip(self, commands)
        finally:
            since_s.pop()

    def kept(self: AttemptWriter, *args: Any) -> None:
        if not since_s or time.monotonic() - since_s[0] < 0.1:
            delta(self, *args)

    Connection.round_trip, AttemptWriter.delta = timed, kept  # type: ignore[method-assign]


@_mechanism("resent results")
def _gives_up_a_send() -> None:
    """A result that Kafka does not acknowledge at once is dropped, and its job counts as complete."""
    from service.ingest.producer import ResultProducer

    original = ResultProducer.send

    async def send(self: ResultProducer, *args: Any, **kwargs: Any) -> None:
        try:
            async with asyncio.timeout(0.3):
                await original(self, *args, **kwargs)
        except TimeoutError:
            return

    ResultProducer.send = send  # type: ignore[method-assign]


@_mechanism("polling while full")
def _stops_polling() -> None:
    """A worker without credit does not poll, and is put out of its group."""
    from service.ingest.poller import Poller

    original = Poller._take

    async def take(self: Poller, consumer: Any, fetchable: Any, credit: int) -> None:
        if not fetchable and consumer.assignment():
            await self.wake.wait()
            return
        await original(self, consumer, fetchable, credit)

    Poller._take = take  # type: ignore[method-assign]


@_mechanism("refusal of unreadable records")
def _skips_what_it_cannot_read() -> None:
    """A record that is no job is committed and never answered."""
    from service.worker.completion import Completion

    async def refuse(self: Completion, run: Any, error: Any) -> None:
        del error
        self.settle(run)

    Completion.refuse_record = refuse  # type: ignore[method-assign]


@_mechanism("cancellation before opening")
def _forgets_early_cancellations() -> None:
    """A cancellation that comes before its job is opened is not seen."""
    from service.worker.job_table import JobTable

    _change_opened(lambda opened: replace(opened, cancelled=False))
    JobTable.was_cancelled = lambda self, job_id: False  # type: ignore[method-assign]


@_mechanism("suppressed duplicates")
def _answers_twice() -> None:
    """A record that has ended is run again when it is delivered again."""
    from service.stream import keys, publisher, server_check

    source = keys.OPEN.source.decode()
    changed = source.replace("elseif held[4] then\n    return", "elseif false then\n    return")
    assert changed != source
    publisher.OPEN = server_check.OPEN = keys.Script.of(changed)


@_mechanism("shared clock")
def _own_clock() -> None:
    """A worker judges deadlines by its own clock."""
    from service.worker.namespace import SharedClock

    SharedClock.set = lambda self, server_s, round_trip_s: None  # type: ignore[method-assign]
