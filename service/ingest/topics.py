"""Creates missing topics, and asks the cluster for its name."""

import structlog
from aiokafka.admin import NewTopic
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    RequestTimedOutError,
    TopicAlreadyExistsError,
    for_code,
)

from service.ingest.kafka_clients import admin_client
from service.ingest.kafka_config import KafkaConfig

log = structlog.get_logger()


async def ensure_topics(config: KafkaConfig) -> tuple[str, ...]:
    """Creates jobs, results and dead-letter topics where they are missing; returns the names it created.

    A broker that refuses (no rights, too few brokers for the replication factor) is reported in the log and left as
    it is: the topics may be managed elsewhere. Raises KafkaError or OSError when the broker cannot be reached.
    """
    try:
        async with admin_client(config) as admin:
            existing = set(await admin.list_topics())
            missing = [topic for topic in _topics(config) if topic.name not in existing]
            if not missing:
                return ()
            response = await admin.create_topics(missing, timeout_ms=10_000)
    except (KafkaConnectionError, NodeNotReadyError, RequestTimedOutError):
        raise
    except (KafkaError, AttributeError) as error:
        # AttributeError: the broker names no controller, which aiokafka does not expect.
        log.warning("kafka_topics_refused", error=repr(error))
        return ()
    created = []
    for name, code, *rest in response.topic_errors:
        refusal = for_code(code)
        if code == 0:
            created.append(name)
        elif refusal is not TopicAlreadyExistsError:
            detail = rest[0] if rest else None
            log.warning("kafka_topic_refused", topic=name, error=refusal.__name__, detail=detail)
    if created:
        log.info("kafka_topics_created", topics=created, num_partitions=config.partitions)
    return tuple(created)


def _topics(config: KafkaConfig) -> list[NewTopic]:
    # The broker's own time: a client's clock that is wrong then neither expires a job nor has its result refused.
    common = {"max.message.bytes": str(config.max_message_bytes), "message.timestamp.type": "LogAppendTime"}
    policies = {
        config.jobs_topic: {"cleanup.policy": "delete"},
        config.results_topic: {"cleanup.policy": "compact,delete"},
        config.dead_letter_topic: {"cleanup.policy": "delete"},
    }
    return [
        NewTopic(name, config.partitions, config.replication_factor, topic_configs=policy | common)
        for name, policy in policies.items()
    ]


async def cluster_id(config: KafkaConfig) -> str:
    """Returns the id of the Kafka cluster; empty where it has none. Raises KafkaError or OSError."""
    async with admin_client(config) as admin:
        return (await admin.describe_cluster()).get("cluster_id") or ""
