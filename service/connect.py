"""Turns settings into what the Kafka and Redis parts take: small frozen configurations and ready clients."""

import ssl
from typing import TYPE_CHECKING

from service.errors import SettingsError
from service.ingest.kafka_config import KafkaConfig
from service.settings import ENV_PREFIX, Settings, part_of
from service.stream.stream_config import StreamConfig

if TYPE_CHECKING:
    from redis.asyncio import Redis

READER_TIMEOUT_S = 10.0


def kafka_config(settings: Settings, *, client_id: str = "tailrace") -> KafkaConfig:
    """Returns what all clients of Kafka need. Raises SettingsError when a certificate file cannot be read."""
    return part_of(
        settings,
        KafkaConfig,
        client_id=client_id,
        ssl_context=_ssl_context(settings),
        rebalance_timeout_s=max(30.0, settings.drain_grace_s + 5.0),
    )


def _ssl_context(settings: Settings) -> ssl.SSLContext | None:
    if not settings.kafka_security_protocol.endswith("SSL"):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.kafka_ssl_cafile)
        if settings.kafka_ssl_certfile:
            context.load_cert_chain(settings.kafka_ssl_certfile, settings.kafka_ssl_keyfile)
    except OSError as error:
        files = (settings.kafka_ssl_cafile, settings.kafka_ssl_certfile, settings.kafka_ssl_keyfile)
        named = ", ".join(file for file in files if file)
        raise SettingsError(f"{ENV_PREFIX}KAFKA_SSL_*: {named} cannot be used: {error}") from error
    return context


def stream_config(settings: Settings, *, worker: str = "") -> StreamConfig:
    return part_of(settings, StreamConfig, worker=worker)


def redis_client(settings: Settings) -> "Redis":
    """Returns a client for readers, which raises soon when Redis is away. Close it with `aclose()`."""
    from redis.asyncio import Redis

    return Redis.from_url(
        settings.redis_url, socket_connect_timeout=READER_TIMEOUT_S, socket_timeout=READER_TIMEOUT_S
    )
