"""Jobs in from Kafka, results and dead letters out to it; offsets are committed only behind durable
results."""

from service.ingest.config import KafkaConfig
from service.ingest.consumer import JobConsumer
from service.ingest.delivery import ConsumerStats, Delivery, TopicPartition
from service.ingest.producer import ResultProducer
from service.ingest.topics import ensure_topics

__all__ = [
    "ConsumerStats",
    "Delivery",
    "JobConsumer",
    "KafkaConfig",
    "ResultProducer",
    "TopicPartition",
    "ensure_topics",
]
