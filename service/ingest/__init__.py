"""Takes jobs from Kafka, writes results and dead letters to it, and commits an offset once its result is durable."""

from service.ingest.consumer import JobConsumer
from service.ingest.delivery import ConsumerStats, Delivery, ProducerStats, TopicPartition
from service.ingest.kafka_config import KafkaConfig
from service.ingest.producer import ResultProducer
from service.ingest.topics import ensure_topics

__all__ = [
    "ConsumerStats",
    "Delivery",
    "JobConsumer",
    "KafkaConfig",
    "ProducerStats",
    "ResultProducer",
    "TopicPartition",
    "ensure_topics",
]
