"""The simulation's own parts: time, processes, connections and servers behave like the real ones."""

import asyncio
import random
from collections.abc import Coroutine
from functools import partial
from typing import Any

from aiokafka.errors import IllegalGenerationError, UnknownMemberIdError

from tests.sim.broker import Broker, BrokerObserver, Record, Unsent
from tests.sim.group import Group, Joined
from tests.sim.loop import Process, VirtualLoop, context_of
from tests.sim.network import Network, Respond, Weather
from tests.sim.ownership import Ownership
from tests.sim.redis_server import RedisObserver, RedisServer


def run(loop: VirtualLoop, work: Coroutine[Any, Any, Any]) -> None:
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


async def count(ticks: list[float], loop: VirtualLoop) -> None:
    while True:
        await asyncio.sleep(1.0)
        ticks.append(loop.time())


def test_a_frozen_process_goes_on_later_and_a_dead_one_never() -> None:
    loop = VirtualLoop()
    ticks: dict[str, list[float]] = {"frozen": [], "dead": [], "sound": []}
    processes = {name: Process(name) for name in ticks}

    async def drive() -> None:
        tasks = [
            loop.create_task(count(ticks[name], loop), context=context_of(process))
            for name, process in processes.items()
        ]
        await asyncio.sleep(1.5)
        loop.freeze(processes["frozen"])
        loop.kill(processes["dead"])
        await asyncio.sleep(3.0)
        loop.resume(processes["frozen"])
        await asyncio.sleep(0.1)
        loop.bury(list(processes.values()))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    run(loop, drive())
    assert ticks == {"frozen": [1.0, 4.5], "dead": [1.0], "sound": [1.0, 2.0, 3.0, 4.0]}


def test_a_connection_is_ordered_and_a_late_request_is_carried_out_though_its_client_gave_up() -> None:
    loop = VirtualLoop()
    network = Network(loop, random.Random(1))
    network.weather = Weather(latency_s=0.01, p_late=0.5, max_late_s=5.0)
    served: list[int] = []

    def serve(number: int, respond: Respond) -> None:
        served.append(number)
        respond(number)

    async def drive() -> None:
        wire = network.wire(None, "redis")
        replies = [wire.call(partial(serve, number)) for number in range(20)]
        await asyncio.wait(replies, timeout=0.05)
        assert len(served) < 20
        wire.close()
        assert any(isinstance(reply.exception(), ConnectionError) for reply in replies if reply.done())
        await asyncio.sleep(10.0)

    run(loop, drive())
    assert served in (list(range(20)), list(range(len(served))))


def test_a_batch_is_appended_once_whatever_its_producer_repeats() -> None:
    loop = VirtualLoop()
    appended: list[Record] = []

    class Observer(BrokerObserver):
        def appended(self, record: Record) -> None:
            appended.append(record)

    broker = Broker(loop, Observer(), {"results": 1})
    first, second = broker.new_producer(), broker.new_producer()
    batch = [Unsent(b"a", b"1"), Unsent(b"b", b"2")]
    assert broker.produce(first, ("results", 0), 0, batch) is None
    assert broker.produce(first, ("results", 0), 0, batch) is None
    assert broker.produce(first, ("results", 0), 3, batch) is not None, "a hole in the sequence"
    assert broker.produce(second, ("results", 0), 0, batch[:1]) is None
    assert [(record.offset, record.key) for record in appended] == [(0, b"a"), (1, b"b"), (2, b"a")]
    loop.close()


def test_a_group_evicts_a_silent_member_and_refuses_its_late_commit() -> None:
    loop = VirtualLoop()
    broker = Broker(loop, BrokerObserver(), {"jobs": 2})
    group = Group(loop, random.Random(1), broker, "jobs", Ownership(0.0), lambda event: None)
    answers: dict[str, Any] = {}

    def join(name: str, member_id: str = "") -> None:
        group.join(member_id, name, 3.0, 3.0, lambda answer: answers.update({name: answer}))

    async def drive() -> None:
        join("a")
        a: Joined = answers["a"]
        assert a.is_leader
        group.sync(a.member_id, a.generation, lambda answer: answers.update(assigned=answer))
        assert answers["assigned"] == [("jobs", 0), ("jobs", 1)]
        assert group.commit(a.member_id, a.generation, {("jobs", 0): (1, "")}) is None
        join("b")
        assert "b" not in answers, "it waits for the other member to join again"
        await asyncio.sleep(2.0)
        join("a", a.member_id)
        assert answers["a"].generation == a.generation + 1
        late = group.commit(a.member_id, a.generation, {("jobs", 0): (0, "")})
        assert isinstance(late, IllegalGenerationError)
        await asyncio.sleep(4.0)
        gone = group.heartbeat(a.member_id, a.generation + 1)
        assert isinstance(gone, UnknownMemberIdError)

    run(loop, drive())
    assert broker.commits == {("jobs", 0): (1, "")}


def test_scripts_run_in_lua_on_the_model_of_redis() -> None:
    loop = VirtualLoop()
    redis = RedisServer(loop, RedisObserver())
    source = b"""
    redis.call('HSET', KEYS[1], 'n', 0, 'x', 2.5)
    redis.call('HINCRBY', KEYS[1], 'n', ARGV[1])
    local held = redis.call('HMGET', KEYS[1], 'n', 'x', 'none')
    local failed = redis.pcall('GET', KEYS[1])
    return {held[1], held[2], held[3] == false and 'nil' or 'value', failed.err, 3.9}
    """
    sha = redis.run([b"SCRIPT", b"LOAD", source])
    reply = redis.run([b"EVALSHA", sha, b"1", b"key", b"41"])
    wrong = b"WRONGTYPE Operation against a key holding the wrong kind of value"
    assert reply == [b"41", b"2.5", b"nil", wrong, 3]
    assert redis.run([b"SET", b"brief", b"1", b"PX", b"500"]) == b"OK"
    loop.now_s = 0.6
    assert redis.run([b"EXISTS", b"brief"]) == 0
    loop.close()
