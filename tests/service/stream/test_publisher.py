"""The publisher against a real Redis, through a proxy that stalls and cuts."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from service.errors import DependencyError, JobError
from service.stream.assemble import Fed, StreamAssembler
from service.stream.keys import JobKeys
from service.stream.publisher import Outcome, StreamPublisher
from service.stream.scripts import APPEND, FENCE, Script, append_script
from service.wire.event import Delta, Event, Start
from tests.support.proxy import Direction, running_proxy
from tests.support.redis import RedisServer
from tests.support.streams import (
    COMPLETED,
    DIGEST,
    FAST,
    eventually,
    log_events,
    open_job,
    running_publisher,
)

pytestmark = pytest.mark.redis
JOB = "job-1"


def assembled(events: list[Event], job_id: str = JOB) -> StreamAssembler:
    assembler = StreamAssembler(job_id)
    for event in events:
        assert assembler.feed(event) is Fed.APPLIED, f"hole or duplicate at {event}"
    return assembler


async def test_a_stream_from_start_to_end(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis, running_publisher(redis_server.url) as publisher:
        opened = await open_job(publisher, JOB, num_choices=2)
        assert (opened.outcome, opened.epoch, opened.cancelled) == (Outcome.OPENED, 1, False)
        publisher.start(JOB, 1, attempt=3)
        for i in range(5):
            assert publisher.delta(JOB, 1, i % 2, f"{i} ", (i,))
        assert await publisher.flushed(JOB, 1)
        assert await publisher.end(JOB, 1, COMPLETED)
        assembler = assembled(await log_events(redis, JOB))
        assert assembler.problems() == []
        assert assembler.texts() == ["0 2 4 ", "1 3 "]
        assert (publisher.num_open_jobs, publisher.backlog_jobs, publisher.backlog_bytes) == (0, 0, 0)
        for key in (JobKeys.of(JOB).log, JobKeys.of(JOB).meta):
            assert 0 < await redis.ttl(key) <= FAST.ttl_s


async def test_python_is_the_limit_so_a_step_of_all_jobs_is_one_round_trip(redis_server: RedisServer) -> None:
    async with running_proxy(redis_server.port) as proxy, running_publisher(proxy.url) as publisher:
        ids = [f"job-{i}" for i in range(32)]
        await asyncio.gather(*(open_job(publisher, job_id) for job_id in ids))
        before = publisher.num_round_trips
        for job_id in ids:
            publisher.start(job_id, 1)
            publisher.delta(job_id, 1, 0, "x", (1,))
        assert all(await asyncio.gather(*(publisher.flushed(job_id, 1) for job_id in ids)))
        assert publisher.num_round_trips == before + 1


# -- taking over ------------------------------------------------------------------------------------------------


async def test_a_redelivered_job_continues_from_the_log(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis:
        async with running_publisher(redis_server.url) as first:
            await open_job(first, JOB)
            first.start(JOB, 1)
            first.delta(JOB, 1, 0, "ab", (1, 2))
            await first.flushed(JOB, 1)
        async with running_publisher(redis_server.url) as second:
            opened = await open_job(second, JOB)
            assert opened.epoch == 2
            assert (opened.resumed[0].token_ids, opened.resumed[0].text) == ((1, 2), "ab")
            second.start(JOB, 2)
            second.delta(JOB, 2, 0, "c", (3,))
        async with running_publisher(redis_server.url) as third:
            opened = await open_job(third, JOB)
            assert (opened.epoch, opened.resumed[0].token_ids) == (3, (1, 2, 3))
            third.start(JOB, 3)
            assert await third.end(JOB, 3, COMPLETED)
        assembler = assembled(await log_events(redis, JOB))
        assert assembler.problems() == []
        assert assembler.texts() == ["abc"]


async def test_an_attempt_that_cannot_continue_begins_the_text_anew(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis, running_publisher(redis_server.url) as publisher:
        await open_job(publisher, JOB)
        publisher.delta(JOB, 1, 0, "old", (1, 2))
        await publisher.flushed(JOB, 1)
        await open_job(publisher, JOB)
        publisher.restart(JOB, 2)
        publisher.delta(JOB, 2, 0, "new", (3,))
        assert await publisher.end(JOB, 2, COMPLETED)
        assembler = assembled(await log_events(redis, JOB))
        assert assembler.problems() == []
        assert assembler.texts() == ["new"]


async def test_a_long_log_is_read_back_page_by_page(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as first, running_publisher(redis_server.url) as second:
        await open_job(first, JOB, num_choices=16)
        first.start(JOB, 1)
        for token in range(80):
            for index in range(16):
                first.delta(JOB, 1, index, "x", (token,))
            await first.flushed(JOB, 1)
        resumed = (await open_job(second, JOB, num_choices=16)).resumed
        assert {choice.token_ids for choice in resumed} == {tuple(range(80))}


async def test_nothing_stands_when_the_log_was_trimmed(redis_server: RedisServer) -> None:
    config = replace(FAST, max_log_entries=64)
    async with running_publisher(redis_server.url, config) as first:
        await open_job(first, JOB)
        first.start(JOB, 1)
        for token in range(400):
            first.delta(JOB, 1, 0, "x", (token,))
            await first.flushed(JOB, 1)
        async with Redis.from_url(redis_server.url) as redis:
            assert await redis.xlen(JobKeys.of(JOB).log) < 200, "the log is bounded"
    async with running_publisher(redis_server.url) as second:
        assert (await open_job(second, JOB)).resumed[0].token_ids == ()


async def test_an_ended_job_is_suppressed_and_another_record_with_its_id_is_a_duplicate(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        await open_job(publisher, JOB)
        other = await open_job(publisher, JOB, origin="jobs/0/8")
        assert (other.outcome, other.ended_status, other.same_digest) == (Outcome.DUPLICATE, None, True)
        changed = await open_job(publisher, JOB, digest="cd" * 32)
        assert (changed.outcome, changed.same_digest) == (Outcome.DUPLICATE, False)
        assert await publisher.end(JOB, 1, COMPLETED), "the duplicates changed nothing"
        again = await open_job(publisher, JOB)
        assert (again.outcome, again.epoch, again.ended_status) == (Outcome.ENDED, 1, "completed")


async def test_a_job_without_a_stream_is_fenced_and_suppressed_too(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as old, running_publisher(redis_server.url) as new:
        await open_job(old, JOB, stream=False)
        await open_job(new, JOB, stream=False)
        assert not await old.end(JOB, 1, COMPLETED)
        assert await new.end(JOB, 2, COMPLETED)
        assert (await open_job(old, JOB, stream=False)).outcome is Outcome.ENDED
        async with Redis.from_url(redis_server.url) as redis:
            assert await redis.exists(JobKeys.of(JOB).log) == 0


# -- fencing (G5) -----------------------------------------------------------------------------------------------


async def two_attempts(url: str, append: Script) -> tuple[list[Event], list[bool], list[tuple[str, int]]]:
    """The old attempt goes on writing after the new one has started, as after a rebalance."""
    fenced: list[tuple[str, int]] = []
    async with (
        running_publisher(
            url, append=append, on_fenced=lambda job_id, epoch: fenced.append((job_id, epoch))
        ) as old,
        running_publisher(url, append=append) as new,
    ):
        await open_job(old, JOB)
        old.start(JOB, 1)
        old.delta(JOB, 1, 0, "a", (1,))
        await old.flushed(JOB, 1)
        await open_job(new, JOB)
        new.start(JOB, 2)
        await new.flushed(JOB, 2)
        old.delta(JOB, 1, 0, "zombie", (2,))
        answers = [
            await old.flushed(JOB, 1),
            await old.end(JOB, 1, COMPLETED),
            old.delta(JOB, 1, 0, "z", (3,)),
        ]
        async with Redis.from_url(url) as redis:
            return await log_events(redis, JOB), answers, fenced


async def test_two_producers_for_one_stream_after_a_failover_the_older_is_fenced(
    redis_server: RedisServer,
) -> None:
    events, answers, fenced = await two_attempts(redis_server.url, APPEND)
    assert [event.epoch for event in events] == [1, 1, 2]
    assert answers == [False, False, False]
    assert fenced == [(JOB, 1)]


async def test_control_without_the_comparison_the_older_attempt_writes(redis_server: RedisServer) -> None:
    open_fence = FENCE.split("if held_epoch")[0]
    events, _, _ = await two_attempts(redis_server.url, append_script(open_fence))
    assert [event.epoch for event in events][:4] == [1, 1, 2, 1]


async def test_two_attempts_with_one_epoch_after_redis_lost_its_memory_are_told_apart(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as old, running_publisher(redis_server.url) as new:
        await open_job(old, JOB)
        redis_server.flush()
        assert (await open_job(new, JOB)).epoch == 1
        old.start(JOB, 1)
        assert not await old.flushed(JOB, 1)
        new.start(JOB, 1)
        assert await new.flushed(JOB, 1)


async def test_the_newer_attempt_wins_even_if_the_older_writes_first_into_an_empty_redis(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as old, running_publisher(redis_server.url) as new:
        await open_job(old, JOB)
        assert (await open_job(new, JOB)).epoch == 2
        redis_server.flush()
        old.start(JOB, 1)
        assert await old.flushed(JOB, 1)
        new.start(JOB, 2)
        assert await new.flushed(JOB, 2)
        old.delta(JOB, 1, 0, "zombie", (1,))
        assert not await old.flushed(JOB, 1)


# -- a bad network ----------------------------------------------------------------------------------------------


async def cut_the_answer_to_the_first_write(redis_server: RedisServer, append: Script) -> list[Event]:
    async with (
        running_proxy(redis_server.port) as proxy,
        running_publisher(proxy.url, append=append) as publisher,
    ):
        await open_job(publisher, JOB)

        def cut(direction: Direction, chunk: bytes) -> None:
            if direction == "to_client":
                proxy.on_chunk = None
                proxy.cut()
                proxy.stall(direction)

        proxy.on_chunk = cut
        publisher.start(JOB, 1)
        publisher.delta(JOB, 1, 0, "a", (1,))
        await eventually(lambda: proxy.on_chunk is None, "the answer to the write was cut off")
        publisher.delta(JOB, 1, 0, "b", (2,))
        proxy.resume()
        assert await publisher.flushed(JOB, 1)
        assert await publisher.end(JOB, 1, COMPLETED)
        assert proxy.num_connections >= 2
        async with Redis.from_url(redis_server.url) as redis:
            return await log_events(redis, JOB)


async def test_a_write_with_unknown_outcome_is_sent_again_and_appears_once(redis_server: RedisServer) -> None:
    assembler = assembled(await cut_the_answer_to_the_first_write(redis_server, APPEND))
    assert assembler.problems() == []
    assert assembler.texts() == ["ab"]


async def test_control_without_comparing_seq_the_resent_events_appear_twice(
    redis_server: RedisServer,
) -> None:
    source = APPEND.source.decode()
    forgetful = Script.of(source.replace("tonumber(held[3] or 0)", "first"))
    assert forgetful.sha != APPEND.sha
    events = await cut_the_answer_to_the_first_write(redis_server, forgetful)
    assert max(Counter(event.seq for event in events).values()) == 2


async def test_a_slow_redis_makes_deltas_merge_and_never_delays_or_piles_up(
    redis_server: RedisServer,
) -> None:
    async with running_proxy(redis_server.port) as proxy, running_publisher(proxy.url) as publisher:
        ids = [f"job-{i}" for i in range(4)]
        for job_id in ids:
            await open_job(publisher, job_id)
            publisher.start(job_id, 1)
        await asyncio.gather(*(publisher.flushed(job_id, 1) for job_id in ids))
        assert publisher.healthy
        proxy.stall("to_client")
        trips = publisher.num_round_trips
        for token in range(500):
            for job_id in ids:
                assert publisher.delta(job_id, 1, 0, "x", (token,))
            if token == 0:
                await eventually(lambda: not publisher.healthy, "a stalled round trip is reported")
        assert publisher.num_round_trips == trips
        assert publisher.backlog_jobs == 4
        assert 0 < publisher.backlog_bytes < 100_000
        proxy.resume()
        assert all(await asyncio.gather(*(publisher.flushed(job_id, 1) for job_id in ids)))
        assert publisher.healthy
        async with Redis.from_url(redis_server.url) as redis:
            for job_id in ids:
                events = await log_events(redis, job_id)
                assert len(events) <= 4, "499 steps were merged"
                assert assembled(events, job_id).choice(0).token_ids == list(range(500))


async def test_a_redis_that_does_not_answer_is_given_up_and_asked_again(redis_server: RedisServer) -> None:
    config = replace(FAST, command_timeout_s=0.1)
    async with running_proxy(redis_server.port) as proxy, running_publisher(proxy.url, config) as publisher:
        await open_job(publisher, JOB)
        proxy.stall("to_client")
        publisher.start(JOB, 1)
        connections = proxy.num_connections
        await eventually(lambda: proxy.num_connections > connections, "it connects anew")
        assert not publisher.healthy
        proxy.resume()
        assert await publisher.flushed(JOB, 1)
        async with Redis.from_url(redis_server.url) as redis:
            assert len(await log_events(redis, JOB)) == 1


async def test_a_cancelled_command_never_hands_its_reply_to_the_next_caller(
    redis_server: RedisServer,
) -> None:
    num_jobs = 60
    async with Redis.from_url(redis_server.url) as redis:
        for i in range(num_jobs):
            fields: Any = {
                "epoch": i,
                "origin": "jobs/0/7",
                "digest": DIGEST,
            }
            await redis.hset(JobKeys.of(f"job-{i}").meta, mapping=fields)
    async with running_proxy(redis_server.port) as proxy, running_publisher(proxy.url) as publisher:
        await open_job(publisher, "warm")
        for round_no in range(3):
            proxy.stall("to_client")
            tasks = [asyncio.create_task(open_job(publisher, f"job-{i}")) for i in range(num_jobs)]
            await proxy.passed("to_server", 1)
            for task in tasks[round_no::3]:
                task.cancel()
            proxy.resume()
            replies = await asyncio.gather(*tasks, return_exceptions=True)
            for i, reply in enumerate(replies):
                if i % 3 == round_no:
                    assert isinstance(reply, asyncio.CancelledError)
                else:
                    assert not isinstance(reply, BaseException)
                    assert reply.epoch == i + 1 + round_no
        assert proxy.num_connections == 1, "no command was broken off"


async def test_a_redis_restart_that_loses_the_scripts_and_all_memory_is_survived(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        await open_job(publisher, JOB)
        publisher.start(JOB, 1)
        publisher.delta(JOB, 1, 0, "a", (1,))
        await publisher.flushed(JOB, 1)
        redis_server.stop()
        publisher.delta(JOB, 1, 0, "b", (2,))
        await eventually(lambda: not publisher.healthy, "Redis is away")
        redis_server.start()
        assert await publisher.flushed(JOB, 1)
        assert publisher.num_lost == 1
        async with Redis.from_url(redis_server.url) as redis:
            assert await log_events(redis, JOB) == [Delta(JOB, 1, 2, 0, "b", (2,))]
            assert await redis.hget(JobKeys.of(JOB).meta, "origin") == b"jobs/0/7"
        assert publisher.healthy


async def test_scripts_flushed_by_an_operator_are_loaded_again(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        await open_job(publisher, JOB)
        await redis.script_flush()
        publisher.start(JOB, 1)
        assert await publisher.flushed(JOB, 1)
        await redis.script_flush()
        assert (await open_job(publisher, "job-2")).epoch == 1
        assert isinstance((await log_events(redis, JOB))[0], Start)


async def test_a_full_redis_holds_the_stream_up_and_loses_nothing(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        await open_job(publisher, JOB)
        await redis.config_set("maxmemory", "1")
        try:
            publisher.start(JOB, 1)
            await eventually(lambda: not publisher.healthy, "the refusal is seen")
        finally:
            await redis.config_set("maxmemory", "0")
        assert await publisher.flushed(JOB, 1)
        assert len(await log_events(redis, JOB)) == 1


async def test_a_foreign_key_costs_one_job_its_stream_and_its_neighbours_nothing(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        await redis.set(JobKeys.of("bad-meta").meta, "not a hash")
        with pytest.raises(JobError, match="bad-meta"):
            await open_job(publisher, "bad-meta")
        for job_id in ("bad-log", "good"):
            await open_job(publisher, job_id)
        await redis.set(JobKeys.of("bad-log").log, "not a stream")
        for job_id in ("bad-log", "good"):
            publisher.start(job_id, 1)
        assert await publisher.flushed("bad-log", 1), "nobody waits for what can never be written"
        assert await publisher.flushed("good", 1)
        # Its job goes on and ends, though nobody can follow it.
        assert publisher.delta("bad-log", 1, 0, "x", (1,))
        assert await publisher.flushed("bad-log", 1)
        assert await publisher.end("bad-log", 1, COMPLETED)
        assert publisher.num_open_jobs == 1
        assert publisher.healthy


async def test_a_meta_without_a_number_for_epoch_is_a_conflict_of_that_job(redis_server: RedisServer) -> None:
    async with running_publisher(redis_server.url) as publisher, Redis.from_url(redis_server.url) as redis:
        await redis.hset(JobKeys.of("junk").meta, mapping={"epoch": "abc"})
        with pytest.raises(JobError, match="junk") as caught:
            await open_job(publisher, "junk")
    assert caught.value.code == "stream_conflict"


async def test_only_attempts_without_a_token_and_without_a_goodbye_count_as_fruitless(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        counts = []
        for ending in ("crash", "crash", "token", "hand back", "hand back", "crash", "crash"):
            opened = await open_job(publisher, JOB)
            counts.append(opened.fruitless)
            publisher.start(JOB, opened.epoch)
            if ending == "token":
                publisher.delta(JOB, opened.epoch, 0, "x", (1,))
                assert await publisher.flushed(JOB, opened.epoch)
            elif ending == "hand back":
                publisher.abandon(JOB, opened.epoch)
    assert counts == [1, 2, 3, 1, 1, 1, 2]


async def test_what_is_not_written_when_the_publisher_stops_is_raised_and_not_passed_over(
    redis_server: RedisServer,
) -> None:
    redis_server.stop()
    publisher = StreamPublisher(replace(FAST, url=redis_server.url))
    running = asyncio.create_task(publisher.run())
    opening = asyncio.create_task(open_job(publisher, JOB))
    await eventually(lambda: publisher.num_failures > 1, "Redis is away")
    publisher.stop()
    async with asyncio.timeout(5):
        await running
    with pytest.raises(DependencyError):
        await opening
    with pytest.raises(DependencyError):
        await open_job(publisher, JOB)


async def test_abandoning_writes_nothing_more_and_leaves_the_log_to_the_next_attempt(
    redis_server: RedisServer,
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        await open_job(publisher, JOB)
        publisher.start(JOB, 1)
        publisher.delta(JOB, 1, 0, "a", (1,))
        await publisher.flushed(JOB, 1)
        publisher.delta(JOB, 1, 0, "b", (2,))
        publisher.abandon(JOB, 1)
        assert not await publisher.flushed(JOB, 1)
        assert (await open_job(publisher, JOB)).resumed[0].token_ids == (1,)
