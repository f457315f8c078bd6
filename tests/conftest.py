"""Fixtures of all tests: real Kafka and real Redis, each started once per run and only when a test asks for it."""

pytest_plugins = ["tests.support.kafka", "tests.support.redis"]
