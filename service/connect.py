"""Turns settings into what the Kafka and Redis parts take: small frozen configurations and ready clients."""

import ssl
from typing import TYPE_CHECKING

from service.errors import SettingsError
from service.ingest.kafka_config import KafkaConfig
from service.settings import ENV_PREFIX, Settings
from service.stream.stream_config import StreamConfig

if TYPE_CHECKING:
    from redis.asyncio import Redis

READER_TIMEOUT_S = 10.0


def kafka_config(settings: Settings, *, client_id: str = "tailrace") -> KafkaConfig:
    """Returns what all clients of Kafka need. Raises SettingsError when a certificate file cannot be read."""
    password = settings.kafka_sasl_password
    return KafkaConfig(
        bootstrap=settings.kafka_bootstrap,
        group_id=settings.group_id,
        jobs_topic=settings.jobs_topic,
        results_topic=settings.results_topic,
        dead_letter_topic=settings.dead_letter_topic,
        client_id=client_id,
        security_protocol=settings.kafka_security_protocol,
        ssl_context=_ssl_context(settings),
        sasl_mechanism=settings.kafka_sasl_mechanism,
        sasl_username=settings.kafka_sasl_username,
        sasl_password=password.get_secret_value() if password else None,
        session_timeout_s=settings.session_timeout_s,
        rebalance_timeout_s=max(30.0, settings.drain_grace_s + 5.0),
        max_poll_interval_s=settings.max_poll_interval_s,
        # Two seconds of prefill may be less than two long prompts: waiting for more credit than that would run
        # them one after the other.
        resume_credit=1,
        num_partitions=settings.partitions,
        replication_factor=settings.replication_factor,
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


def stream_config(settings: Settings) -> StreamConfig:
    return StreamConfig(
        url=settings.redis_url,
        namespace=settings.namespace,
        ttl_s=settings.stream_ttl_s,
        max_log_entries=settings.stream_max_events,
    )


def redis_client(settings: Settings) -> "Redis":
    """Returns a client for readers, which raises soon when Redis is away. Close it with `aclose()`."""
    from redis.asyncio import Redis

    return Redis.from_url(
        settings.redis_url, socket_connect_timeout=READER_TIMEOUT_S, socket_timeout=READER_TIMEOUT_S
    )
