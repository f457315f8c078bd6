"""A broker that does not hold empty fetches must not be asked hundreds of times a second."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.protocol.fetch import FetchRequest

from service.ingest import fetch_throttle
from service.ingest.fetch_throttle import PAUSE_S, FetchThrottle, is_empty

REQUEST = FetchRequest(max_wait_time=500, min_bytes=1, max_bytes=1, isolation_level=0, topics=[], rack_id="")


def response(*partitions: tuple[int, int, bytes]) -> Any:
    """(partition, error code, records) each; the high-water mark in between is of no interest."""
    return SimpleNamespace(
        topics=[("jobs", [(number, error, 7, data) for number, error, data in partitions])]
    )


async def pauses_after(answer: Any, request: Any = REQUEST, held_s: float = 0.0) -> list[float]:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def send(node_id: int, sent: Any, **options: Any) -> Any:
        assert (node_id, sent, options) == (1, request, {"group": 0})
        await asyncio.sleep(held_s)
        return answer

    assert await FetchThrottle(send, sleep)(1, request, group=0) is answer
    return pauses


async def test_hazard_an_empty_answer_that_was_not_held_is_followed_by_a_pause() -> None:
    assert await pauses_after(response((0, 0, b""), (1, 0, b""))) == [PAUSE_S]


async def test_records_and_errors_are_passed_on_at_once() -> None:
    assert await pauses_after(response((0, 0, b""), (1, 0, b"records"))) == []
    assert await pauses_after(response((0, 3, b""))) == []


async def test_requests_other_than_fetches_are_passed_on() -> None:
    assert await pauses_after("anything", request="heartbeat") == []


async def test_a_broker_that_holds_fetches_is_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_throttle, "HELD_S", 0.0)
    assert await pauses_after(response((0, 0, b""))) == []


def test_an_answer_without_topics_is_empty() -> None:
    assert is_empty(SimpleNamespace(topics=[]))
