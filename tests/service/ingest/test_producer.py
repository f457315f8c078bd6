"""The producer without a broker."""

import pytest

from service.errors import DependencyError
from service.ingest import ResultProducer
from tests.support.configs import kafka_config


async def test_stop_without_start_is_harmless() -> None:
    await ResultProducer(kafka_config()).stop()


async def test_an_unexpected_failure_of_the_supervisor_ends_run_and_so_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producer = ResultProducer(kafka_config())

    def fail(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("service.ingest.producer_supervisor.make_producer", fail)
    with pytest.raises(TypeError, match="a bug"):
        await producer.run()
    with pytest.raises(DependencyError):
        await producer.send("results", b"key", b"value")
