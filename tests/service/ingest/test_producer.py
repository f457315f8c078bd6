"""The producer without a broker."""

from service.ingest import KafkaConfig, ResultProducer


async def test_hazard_acks_all_and_idempotence_are_not_aiokafkas_defaults() -> None:
    inner = ResultProducer(KafkaConfig())._supervisor._make_producer()
    try:
        assert inner._sender._acks == -1
        assert inner._txn_manager is not None
    finally:
        await inner.stop()


async def test_stop_without_start_is_harmless() -> None:
    await ResultProducer(KafkaConfig()).stop()
