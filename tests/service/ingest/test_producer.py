"""The producer without a broker."""

import pytest

from service.errors import DependencyError
from service.ingest import KafkaConfig, ResultProducer
from service.ingest.producer_supervisor import ProducerSupervisor


async def test_hazard_acks_all_and_idempotence_are_not_aiokafkas_defaults() -> None:
    inner = ResultProducer(KafkaConfig())._supervisor._make_producer()
    try:
        assert inner._sender._acks == -1
        assert inner._txn_manager is not None
    finally:
        await inner.stop()


async def test_stop_without_start_is_harmless() -> None:
    await ResultProducer(KafkaConfig()).stop()


async def test_an_unexpected_failure_of_the_supervisor_ends_run_and_so_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producer = ResultProducer(KafkaConfig())

    def fail(_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(ProducerSupervisor, "_make_producer", fail)
    with pytest.raises(TypeError, match="a bug"):
        await producer.run()
    with pytest.raises(DependencyError):
        await producer.send("results", b"key", b"value")
