"""The worker: jobs from Kafka through the engine to Redis and back to Kafka."""
